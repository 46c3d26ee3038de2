"""`draftwood bench overhead`: what the host works in a decoding step, for each sequence, by strategy.

The engine runs in this process on a model that costs nothing (`costless`), so that what is left is its own: schedule,
draft, verify, learn. With `--growth`, against vocabulary, context, prompt and memory; everything else stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftwood_benchmarks.harness.machine import OtherLoad, warning
from draftwood_benchmarks.harness.report import PictureOptions, console, progress, table
from draftwood_benchmarks.load.command import read_levels
from draftwood_benchmarks.overhead.decoding import ANSWER_TOKENS, LEARNED, HostRow, prompt_us, step_us
from draftwood_benchmarks.overhead.sampling import by_vocabulary, sampling_rows
from draftwood_client.cli.options import command
from draftwood_strategies.registry import warm_up

STRATEGIES = ("none", "trie", "hybrid")
_STRATEGY = "hybrid"
"""Of `--growth`."""
_CONTEXTS = (512, 4_096, 16_384, 65_536)
_PROMPTS = _CONTEXTS
_MEMORIES = (10_000, 100_000, 1_000_000)
_SAMPLING = {"vocabulary": "{vocabulary:,}", "top-k": "{top_k}", "top-p": "{top_p:g}", "ms": "{choose_ms:.3f}"}


@command
def overhead(
    output: PictureOptions,
    streams: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of sequences at once.")] = "1,32",
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Draft nodes of a sequence, at most.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="How often each case is measured; the best counts.")] = 3,
    growth: Annotated[
        bool, typer.Option("--growth", help="Measure what grows with vocabulary, context, prompt and memory.")
    ] = False,
    sampling: Annotated[
        bool, typer.Option("--sampling", help="Measure what choosing a token takes by the size of the vocabulary.")
    ] = False,
) -> None:
    """Microseconds of a decoding step that the model does not take, for each sequence, by strategy."""
    out, levels = console(), read_levels(streams)
    output.check()
    if sampling:
        rows = [asdict(row) for row in sampling_rows(rounds)]
        out.print(table("Choosing a token, temperature 0.6", rows, _SAMPLING))
        output.write(rows)
        return
    for strategy in STRATEGIES:  # compiled code is loaded at its first call
        warm_up(strategy)
        step_us(strategy, 2, nodes)
    load = OtherLoad()
    rows = [asdict(row) for row in (_growth(nodes, rounds, out) if growth else _by_streams(levels, nodes, rounds, out))]
    busy = load.share()
    out.print(table_of(rows, f"Host time of a sequence, {nodes} draft nodes at most{warning(busy)}"))
    output.draw(lambda axes: _draw(axes, rows))
    output.write(rows, nodes=nodes, busy=busy)


def _by_streams(levels: Sequence[int], nodes: int, rounds: int, out: Console) -> list[HostRow]:
    cases = [(strategy, count) for count in levels for strategy in STRATEGIES]
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for case in progress(cases * rounds, "rounds", out):
        found[case].append(step_us(*case, nodes))
    return [HostRow("streams", case[1], f"a warm step, {case[0]}", min(found[case])) for case in cases]


def _growth(nodes: int, rounds: int, out: Console) -> list[HostRow]:
    """One quantity after the other."""
    rows, step = [*by_vocabulary(rounds)], f"a warm step, {_STRATEGY}"

    def best(context: int, learned: int) -> float:
        return min(step_us(_STRATEGY, 1, nodes, context, learned) for _ in range(rounds))

    for size in progress(_CONTEXTS, "context", out):
        rows.append(HostRow("context", size, step, best(size, LEARNED)))
    for size in progress(_PROMPTS, "prompt", out):
        totals, longest = zip(*(prompt_us(_STRATEGY, size) for _ in range(rounds)), strict=True)
        rows.append(HostRow("prompt", size, "all steps of a prompt", min(totals)))
        rows.append(HostRow("prompt", size, "the longest of them", min(longest)))
    for size in progress(_MEMORIES, "memory", out):
        rows.append(HostRow("memory", size, step, best(_CONTEXTS[0], size // ANSWER_TOKENS)))
    return rows


def table_of(rows: Sequence[dict[str, Any]], title: str) -> Table:
    columns = {"grows with": "{grows_with}", "timed": "{what}", "size": "{size:,}", "us": "{host_us:,.1f}"}
    return table(title, rows, columns, texts=2)


def _draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for case in dict.fromkeys((row["grows_with"], row["what"]) for row in rows):
        own = [row for row in rows if (row["grows_with"], row["what"]) == case]
        axes.plot([row["size"] for row in own], [row["host_us"] for row in own], "o-", label=": ".join(case))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("streams, or tokens in the vocabulary, context, prompt or memory")
    axes.set_ylabel("microseconds of host time")
    axes.legend(fontsize=7)
