"""`draftwood bench replay`: a strategy on recorded outputs, alone or beside the drafts of another engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from draftwood_benchmarks.harness.report import OutputOptions, console, progress, table
from draftwood_benchmarks.replay.peers import sglang_trie, suffix_decoding
from draftwood_benchmarks.replay.replay import ChainLimits, Replayed, replay
from draftwood_benchmarks.replay.trace import TRACES_HELP, Recording, TraceError, read_trace, trace_name
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidInputError
from draftwood_strategies import create


@command
def replay_command(
    output: OutputOptions,
    files: Annotated[list[Path], typer.Argument(help=TRACES_HELP)],
    strategy: Annotated[str, typer.Option(help="A registered strategy that reads only token ids.")] = "trie",
    budget: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Draft nodes per step; may be given several times. 16 and 64 by default."),
    ] = None,
    learn: Annotated[str | None, typer.Option(help="What the memory learns: outputs, prompts or both.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each file.")] = None,
    chains: Annotated[
        int | None, typer.Option(min=1, help="Draft one chain of at most so many tokens, as vLLM verifies.")
    ] = None,
    cut: Annotated[float, typer.Option(min=0, max=1, help="Chains end where the probability falls below this.")] = 0.0,
    peer: Annotated[
        Literal["vllm", "sglang"] | None,
        typer.Option(
            help="Beside the chains of vLLM's suffix decoding (with --chains), or the trie of SGLang's n-gram drafts,"
            " with nodes as it counts; `make peers` installs them."
        ),
    ] = None,
) -> None:
    """Replay a strategy over recorded outputs: tokens per step, drafting and learning time, memory per token."""
    out = console()
    output.check()
    options: dict[str, object] = {} if learn is None else {"learn": learn}
    if (peer == "vllm") and chains is None:
        raise InvalidInputError("--peer", peer, "vLLM verifies chains; give --chains")
    try:
        create(strategy, **options)
        traces = {trace_name(path): list(read_trace(path, limit)) for path in files}
    except (TraceError, LookupError, TypeError, ValueError) as error:
        raise InvalidInputError("replay", None, str(error)) from error
    budgets = budget or [16, 64]
    if peer == "sglang":
        rows = [*_beside_sglang(strategy, options, traces, budgets)]
    else:
        limits = None if chains is None else ChainLimits(chains, cut)
        rows = [*_rows(out, strategy, options, traces, budgets, limits)]
        if peer == "vllm" and chains is not None:
            rows += [_row(name, "suffix", chains, found) for name, found in suffix_decoding(traces, chains)]
            rows.sort(key=lambda row: [*traces].index(row["trace"]))
    columns = {"trace": "{trace}", "strategy": "{strategy}"}
    columns |= {"known": "{known}"} if peer == "sglang" else {"drafted a step": "{drafted_per_step:.2f}"}
    columns |= {"nodes": "{budget}", "tokens a step": "{acceptance_length:.3f}", "draft us": "{draft_us:.1f}"}
    columns |= {"learn us a token": "{learn_us_per_token:.2f}", "bytes a token": "{bytes_per_token:.0f}"}
    out.print(table("Replay of recorded outputs", rows, columns, texts=2))
    output.write(rows)


def _rows(
    out: Console,
    strategy: str,
    options: Mapping[str, object],
    traces: Mapping[str, Sequence[Recording]],
    budgets: Sequence[int],
    chains: ChainLimits | None,
) -> Iterator[dict[str, Any]]:
    for name, recordings in traces.items():
        for budget in budgets:
            replay(create(strategy, **options), recordings[:1], budget, chains)  # compiles
            shown = progress(recordings, f"{name}, {budget} nodes", out)
            yield _row(name, strategy, budget, replay(create(strategy, **options), shown, budget, chains))


def _beside_sglang(
    strategy: str,
    options: Mapping[str, object],
    traces: Mapping[str, Sequence[Recording]],
    budgets: Sequence[int],
) -> Iterator[dict[str, Any]]:
    for trace, known, nodes, ours, theirs in sglang_trie(strategy, options, traces, budgets):
        yield _row(trace, strategy, nodes, ours, known)
        yield _row(trace, "sglang", nodes, theirs, known)


def _row(trace: str, strategy: str, budget: int, found: Replayed, known: str = "nothing") -> dict[str, Any]:
    return {
        "trace": trace,
        "known": known,
        "strategy": strategy,
        "budget": budget,
        "acceptance_length": round(found.acceptance_length, 4),
        "draft_us": round(found.draft_us, 2),
        "learn_us_per_token": round(found.learn_us_per_token, 3),
        "bytes_per_token": round(found.bytes_per_token, 1),
        "drafted_per_step": round(found.drafted_per_step, 3),
    }
