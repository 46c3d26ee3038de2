"""`draftwood bench overhead`: what the host works in a decoding step, for each sequence, by strategy.

The engine runs in this process on a model that costs nothing (`costless`), so that what is left is its own: schedule,
draft, verify, learn. With `--growth`, against vocabulary, context, prompt and memory; everything else stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from draftwood_benchmarks.harness.machine import OtherLoad, warning
from draftwood_benchmarks.harness.report import PictureOptions, Rows, progress, table
from draftwood_benchmarks.load.command import read_levels
from draftwood_benchmarks.overhead.decoding import ANSWER_TOKENS, LEARNED, host_row, prompt_us, step_us
from draftwood_benchmarks.overhead.sampling import by_vocabulary, sampling_rows
from draftwood_client.cli.options import command
from draftwood_strategies.registry import warm_up

STRATEGIES = ("none", "trie", "hybrid")
_STRATEGY = "hybrid"
"""Of `--growth`."""
_CONTEXTS = (512, 4_096, 16_384, 65_536)
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
    levels = read_levels(streams)
    if sampling:
        rows = [*sampling_rows(rounds)]
        output.report(table("Choosing a token, temperature 0.6", rows, _SAMPLING), rows)
        return
    for strategy in STRATEGIES:  # compiled code is loaded at its first call
        warm_up(strategy)
        step_us(strategy, 2, nodes)
    load = OtherLoad()
    rows = _growth(nodes, rounds) if growth else _by_streams(levels, nodes, rounds)
    busy = load.share()
    shown = table_of(rows, f"Host time of a sequence, {nodes} draft nodes at most{warning(busy)}")
    output.report(shown, rows, nodes=nodes, busy=busy)
    output.draw(lambda axes: _draw(axes, rows))


def _by_streams(levels: Sequence[int], nodes: int, rounds: int) -> Rows:
    cases = [(strategy, count) for count in levels for strategy in STRATEGIES]
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for case in progress(cases * rounds, "rounds"):
        found[case].append(step_us(*case, nodes))
    return [host_row("streams", case[1], f"a warm step, {case[0]}", min(found[case])) for case in cases]


def _growth(nodes: int, rounds: int) -> Rows:
    """One quantity after the other."""
    rows, step = [*by_vocabulary(rounds)], f"a warm step, {_STRATEGY}"

    def best(context: int, learned: int) -> float:
        return min(step_us(_STRATEGY, 1, nodes, context, learned) for _ in range(rounds))

    for size in progress(_CONTEXTS, "context"):
        rows.append(host_row("context", size, step, best(size, LEARNED)))
    for size in progress(_CONTEXTS, "prompt"):
        totals, longest = zip(*(prompt_us(_STRATEGY, size) for _ in range(rounds)), strict=True)
        rows.append(host_row("prompt", size, "all steps of a prompt", min(totals)))
        rows.append(host_row("prompt", size, "the longest of them", min(longest)))
    for size in progress(_MEMORIES, "memory"):
        rows.append(host_row("memory", size, step, best(_CONTEXTS[0], size // ANSWER_TOKENS)))
    return rows


def table_of(rows: Rows, title: str) -> Table:
    columns = {"grows with": "{grows_with}", "timed": "{what}", "size": "{size:,}", "us": "{host_us:,.1f}"}
    return table(title, rows, columns, texts=2)


def _draw(axes: Any, rows: Rows) -> None:
    for case in dict.fromkeys((row["grows_with"], row["what"]) for row in rows):
        own = [row for row in rows if (row["grows_with"], row["what"]) == case]
        axes.plot([row["size"] for row in own], [row["host_us"] for row in own], "o-", label=": ".join(case))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(
        xlabel="streams, or tokens in the vocabulary, context, prompt or memory", ylabel="microseconds of host time"
    )
    axes.legend(fontsize=7)
