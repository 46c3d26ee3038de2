"""`draftwood bench replay`: a strategy on recorded outputs, alone or beside the drafts of another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftwood_benchmarks.harness.report import OutputOptions, progress, table
from draftwood_benchmarks.peers.process import running_program
from draftwood_benchmarks.replay.replay import ChainLimits, Replayed, created, replay
from draftwood_benchmarks.replay.trace import TRACES_HELP, Recording, read_trace, trace_name
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidInputError
from draftwood_strategies import Strategy

_PEER_TIMEOUT = 3600.0
_MEASURED = 50
"""Recordings whose outputs are put into SGLang's trie to see what it takes of memory."""
Traces = Mapping[str, Sequence[Recording]]


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
    options: dict[str, object] = {} if learn is None else {"learn": learn}
    if peer == "vllm" and chains is None:
        raise InvalidInputError("--peer", peer, "vLLM verifies chains; give --chains")
    created("--strategy", strategy, options)
    traces = {trace_name(path): list(read_trace(path, limit)) for path in files}

    def create() -> Strategy:
        return created("--strategy", strategy, options)

    budgets = budget or [16, 64]
    if peer == "sglang":
        rows = [*_beside_sglang(strategy, create, traces, budgets)]
    else:
        limits = None if chains is None else ChainLimits(chains, cut)
        rows = [*_rows(strategy, create, traces, budgets, limits)]
        if peer == "vllm":
            rows = sorted([*rows, *_suffix_decoding(traces, chains)], key=lambda row: [*traces].index(row["trace"]))
    columns = {"trace": "{trace}", "strategy": "{strategy}"}
    columns |= {"known": "{known}"} if peer == "sglang" else {"drafted a step": "{drafted_per_step:.2f}"}
    columns |= {"nodes": "{budget}", "tokens a step": "{acceptance_length:.3f}", "draft us": "{draft_us:.1f}"}
    columns |= {"learn us a token": "{learn_us_per_token:.2f}", "bytes a token": "{bytes_per_token:.0f}"}
    output.report(table("Replay of recorded outputs", rows, columns, texts=2), rows)


def _rows(
    strategy: str,
    create: Callable[[], Strategy],
    traces: Traces,
    budgets: Sequence[int],
    chains: ChainLimits | None,
) -> Iterator[dict[str, Any]]:
    for name, recordings in traces.items():
        for budget in budgets:
            replay(create(), recordings[:1], budget, chains)  # compiles
            shown = progress(recordings, f"{name}, {budget} nodes")
            yield _row(name, strategy, budget, replay(create(), shown, budget, chains))


def _suffix_decoding(traces: Traces, longest: int | None) -> Iterator[dict[str, Any]]:
    """The chains of vLLM's suffix decoding of at most `longest` tokens, without the size of its memory. Raises
    PeerError: it is not installed, or failed."""
    with running_program("vllm", "suffix_replay") as program:
        for name, recordings in traces.items():
            request = {"op": "replay", "longest": longest, "recordings": _lists(recordings)}
            yield _row(name, "suffix", longest or 0, Replayed(**program.ask(request, _PEER_TIMEOUT)))


def _beside_sglang(
    strategy: str, create: Callable[[], Strategy], traces: Traces, budgets: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A strategy beside the trie of SGLang's n-gram drafts.

    Both know "nothing" at first, or "half": the outputs of the first half of the trace, SGLang's trie as its corpus,
    and the other half is replayed. The last written token is one of the nodes, as SGLang counts them.

    Raises:
        PeerError: it is not installed, or failed.
    """
    with running_program("sglang", "sglang_replay") as program:
        for trace, recordings in traces.items():
            measured = {"op": "memory", "recordings": _lists(recordings[:_MEASURED])}
            size = program.ask(measured, _PEER_TIMEOUT)["bytes_per_token"]
            half = len(recordings) // 2
            for known, replayed in (([], recordings), (recordings[:half], recordings[half:])):
                outputs, sent = [output.tolist() for _, output in known], "half" if known else "nothing"
                for nodes in budgets:
                    request = {"op": "replay", "nodes": nodes, "known": outputs, "recordings": _lists(replayed)}
                    theirs = Replayed(**program.ask(request, _PEER_TIMEOUT), bytes_per_token=size)
                    ours = create()
                    for prompt, output in known:
                        drafter = ours.start(prompt)
                        drafter.observe(output, None)
                        drafter.close()
                    yield _row(trace, strategy, nodes, replay(ours, replayed, nodes - 1), sent)
                    yield _row(trace, "sglang", nodes, theirs, sent)


def _lists(recordings: Sequence[Recording]) -> list[list[list[int]]]:
    return [[prompt.tolist(), output.tolist()] for prompt, output in recordings]


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
