"""`draftwood bench replay`: a strategy on recorded outputs, alone or beside the drafts of another engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.table import Table

from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, Rows, progress, table
from draftwood_benchmarks.peers.process import running_program
from draftwood_benchmarks.replay import (
    TRACES_HELP,
    ChainLimits,
    Recording,
    Replayed,
    created,
    read_trace,
    replay,
    trace_name,
)
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidInputError
from draftwood_strategies import Strategy, create, strategy_names
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.built_in import TrieOptions
from draftwood_strategies.device.arena import MOST_NODES, ArenaTooLargeError, DeviceSizes
from draftwood_strategies.registry import options_of
from draftwood_strategies.trie.phrase_index import LEAST_TOKENS, TOKENS_PER_BLOCK

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
    device_drafts: Annotated[
        bool,
        typer.Option(
            "--device-drafts",
            help="The trie's form for GPUs beside the host's: on a GPU, or if there is none by NumPy, which takes some"
            " 50 ms a draft.",
        ),
    ] = False,
) -> None:
    """Replay a strategy over recorded outputs: tokens per step, drafting and learning time, memory per token."""
    if peer == "vllm" and chains is None:
        raise InvalidInputError("--peer", peer, "vLLM verifies chains; give --chains")
    budgets = budget or [16, 64]
    if device_drafts:
        _check_device_drafts(strategy, budgets, chains is not None or peer is not None)
    created("--strategy", strategy)
    traces = {trace_name(path): list(read_trace(path, limit)) for path in files}
    if device_drafts:
        rows = [*_on_device(traces, budgets)]
    elif peer == "sglang":
        rows = [*_beside_sglang(strategy, traces, budgets)]
    else:
        rows = [*_replayed(strategy, traces, budgets, None if chains is None else ChainLimits(chains, cut))]
        if peer == "vllm":
            rows = sorted([*rows, *_suffix_decoding(traces, chains)], key=lambda row: [*traces].index(row["trace"]))
    columns = {"trace": "{trace}", "strategy": "{strategy}"}
    columns |= {"known": "{known}"} if peer == "sglang" else {"drafted a step": "{drafted_per_step:.2f}"}
    columns |= {"nodes": "{budget}", "tokens a step": "{acceptance_length:.3f}"}
    columns |= {"host's tokens a step": "{host_acceptance_length:.3f}"} if device_drafts else {}
    columns |= {"draft us": "{draft_us:.1f}"}
    columns |= {"learn us a token": "{learn_us_per_token:.2f}", "bytes a token": "{bytes_per_token:.0f}"}
    output.report(table("Replay of recorded outputs", rows, columns, texts=2), rows)


def _replayed(
    strategy: str, traces: Traces, budgets: Sequence[int], chains: ChainLimits | None
) -> Iterator[dict[str, Any]]:
    for name, recordings in traces.items():
        for budget in budgets:
            replay(create(strategy), recordings[:1], budget, chains)  # compiles
            shown = progress(recordings, f"{name}, {budget} nodes")
            yield _row(name, strategy, budget, replay(create(strategy), shown, budget, chains))


def _on_device(traces: Traces, budgets: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The trie on a device beside that of the host.

    Raises:
        BenchmarkError: the arena does not fit the device's memory.
        DeviceUnsupportedError: kernels cannot be compiled.
    """
    for name, recordings in traces.items():
        for budget in budgets:
            host = replay(create("trie"), recordings, budget)
            replay(_device_trie(recordings, budget), recordings[:1], budget)  # compiles
            shown = progress(recordings, f"{name}, {budget} nodes")
            row = _row(name, "trie", budget, replay(_device_trie(recordings, budget), shown, budget))
            yield row | {"host_acceptance_length": round(host.acceptance_length, 4)}


def _check_device_drafts(strategy: str, budgets: Sequence[int], chains: bool) -> None:
    """Raises InvalidInputError: there is no such form of a replay."""
    if strategy != "trie":
        raise InvalidInputError("--device-drafts", None, "it replays trie: others need what a model predicts")
    if chains:
        raise InvalidInputError("--device-drafts", None, "it replays trees, without --chains and --peer")
    if max(budgets) > MOST_NODES:
        raise InvalidInputError("--budget", max(budgets), f"drafts on a device have at most {MOST_NODES} nodes")


def _device_trie(recordings: Sequence[Recording], budget: int) -> Strategy:
    """A trie in an arena of its own, with space for these recordings, or for as many tokens as a host's trie holds."""
    import torch  # takes seconds, and only this needs it

    from draftwood_strategies.device.draft_device import DraftDevice
    from draftwood_strategies.device.strategy import DeviceStrategy

    lengths = [prompt.size + output.size for prompt, output in recordings]
    padded = sum(lengths) + 2 * TOKENS_PER_BLOCK * len(lengths)
    sizes = DeviceSizes(
        rows=1,
        row_tokens=max(LEAST_TOKENS, *lengths),
        tenants=1,
        tenant_tokens=max(LEAST_TOKENS, min(TrieOptions.capacity_tokens, 2 * padded)),
        nodes=budget,
    )
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return DeviceStrategy(DraftDevice(sizes, device, TrieOptions()))
    except ArenaTooLargeError as error:
        raise BenchmarkError(str(error)) from error


def _suffix_decoding(traces: Traces, longest: int | None) -> Iterator[dict[str, Any]]:
    """The chains of vLLM's suffix decoding of at most `longest` tokens, without the size of its memory. Raises
    PeerError: it is not installed, or failed."""
    with running_program("vllm", "suffix_replay") as program:
        for name, recordings in traces.items():
            request = {"op": "replay", "longest": longest, "recordings": _lists(recordings)}
            yield _row(name, "suffix", longest or 0, Replayed(**program.ask(request, _PEER_TIMEOUT)))


def _beside_sglang(strategy: str, traces: Traces, budgets: Sequence[int]) -> Iterator[dict[str, Any]]:
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
                    ours = create(strategy)
                    for prompt, output in known:
                        drafter = ours.start(prompt)
                        drafter.observe(output, None)
                        drafter.close()
                    yield _row(trace, strategy, nodes, replay(ours, replayed, nodes - 1), sent)
                    yield _row(trace, "sglang", nodes, theirs, sent)


def _lists(recordings: Sequence[Recording]) -> list[list[list[int]]]:
    return [[prompt.tolist(), output.tolist()] for prompt, output in recordings]


def _row(trace: str, strategy: str, budget: int, replayed: Replayed, known: str = "nothing") -> dict[str, Any]:
    row = {"trace": trace, "known": known, "strategy": strategy, "budget": budget}
    row |= {"acceptance_length": round(replayed.acceptance_length, 4), **_costs(replayed)}
    bytes_per_token, drafted = round(replayed.bytes_per_token, 1), round(replayed.drafted_per_step, 3)
    return row | {"bytes_per_token": bytes_per_token, "drafted_per_step": drafted}


def _costs(replayed: Replayed) -> dict[str, float]:
    """Microseconds of a draft, and of learning a token."""
    return {"draft_us": round(replayed.draft_us, 2), "learn_us_per_token": round(replayed.learn_us_per_token, 3)}


SIZES = (10_000, 100_000, 1_000_000)
"""Tokens in memory."""
_PHRASES, _VOCABULARY, _ZIPF = 20_000, 30_000, 1.2
"""Of the synthetic text: number of phrases, of token ids, and the exponent of the frequencies of both. Not tuned: the
text only has to repeat itself as texts do, and real traces can be given instead."""
_TEXT_TOKENS = 300
"""Length of a synthetic output."""
_LEAST_CAPACITY = 1_000_000
"""Tokens; a memory that is filled less has the capacity of a usual one."""


@command
def memory(
    output: OutputOptions,
    files: Annotated[
        list[Path] | None, typer.Argument(help="Traces as for `bench replay`; without any, synthetic text.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="A strategy with a memory of tokens.")] = "trie",
    budget: Annotated[int, typer.Option(min=1, help="Draft nodes per step.")] = 64,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1000, help="Tokens in memory; may be given several times.")
    ] = None,
    measured: Annotated[int, typer.Option(min=1, help="Recordings of each file to replay.")] = 10,
) -> None:
    """Drafting time, learning time and bytes of a strategy with 10,000, 100,000 and 1,000,000 tokens in memory."""
    sizes = tokens or SIZES
    traces = [list(read_trace(path)) for path in files or []]
    traces = traces or [synthetic(max(sizes) // _TEXT_TOKENS + 1 + measured)]
    rows = [row_of(strategy, size, budget, traces, measured) for size in progress(sizes, "measuring")]
    output.report(table_of(rows), rows)


def row_of(name: str, tokens: int, budget: int, traces: Sequence[Sequence[Recording]], measured: int) -> dict[str, Any]:
    """Fills a new memory with `tokens` tokens, and replays the last `measured` recordings of each trace over it; its
    figures are those of `replay.Replayed`.

    Raises:
        BenchmarkError: the traces hold fewer tokens, or the strategy has no memory of tokens.
        InvalidInputError: there is no strategy of this name.
    """
    kept = [recording for trace in traces for recording in trace[-measured:]]
    replay(_filled(name, 1000, traces, measured), kept[:1], budget)  # compiles
    strategy: Any = _filled(name, tokens, traces, measured)
    held, size = int(strategy.tokens), int(getattr(strategy, "nbytes", 0))
    row = {"tokens": held, "strategy": name, "budget": budget, **_costs(replay(strategy, kept, budget))}
    return row | {"bytes_per_token": round(size / held, 1)}


def synthetic(recordings: int, seed: int = 0) -> list[Recording]:
    """Synthetic recordings of `_TEXT_TOKENS` tokens, made of phrases with a Zipf distribution."""
    random = np.random.default_rng(seed)
    ends = np.cumsum(random.integers(2, 12, _PHRASES))
    book = random.zipf(_ZIPF, ends[-1]).clip(max=_VOCABULARY).astype(np.int32)
    phrases = np.split(book, ends[:-1])
    recordings_made = []
    for _ in range(recordings):
        drawn = random.zipf(_ZIPF, _TEXT_TOKENS).clip(max=_PHRASES) - 1
        text = np.concatenate([phrases[at] for at in drawn])[: _TEXT_TOKENS + 1]
        recordings_made.append((text[:1], text[1:]))
    return recordings_made


def _filled(name: str, tokens: int, traces: Sequence[Sequence[Recording]], measured: int) -> Strategy:
    """A new strategy that has learned `tokens` tokens, or a few more."""
    bounded = name in strategy_names() and "capacity_tokens" in options_of(name)
    # Sequence starts and unfinished blocks take up capacity as well.
    capacity = {"capacity_tokens": max(tokens * 5 // 4, _LEAST_CAPACITY)} if bounded else {}
    strategy: Any = created("--strategy", name, capacity)
    if not hasattr(strategy, "learn") or not hasattr(strategy, "tokens"):
        raise BenchmarkError(f"strategy {name!r} keeps no memory of tokens")
    for text in _texts(traces, measured):
        if strategy.tokens >= tokens:
            break
        strategy.learn(text[: tokens - int(strategy.tokens)])
    if strategy.tokens < tokens:
        raise BenchmarkError(f"the recordings fill a memory with {strategy.tokens} tokens, not {tokens}")
    return strategy  # type: ignore[no-any-return]


def _texts(traces: Sequence[Sequence[Recording]], measured: int) -> Iterator[Int32Array]:
    """The outputs, alternating between the traces, then the prompts."""
    for part in (1, 0):
        for row in zip_longest(*(trace[:-measured] for trace in traces)):
            yield from (recording[part] for recording in row if recording is not None)


def table_of(rows: Rows) -> Table:
    columns = {"tokens in memory": "{tokens:,}", "strategy": "{strategy}", "nodes": "{budget}"}
    columns |= {"draft us": "{draft_us:.1f}", "learn us/token": "{learn_us_per_token:.2f}"}
    return table("Cost of a memory by its size", rows, columns | {"bytes/token": "{bytes_per_token:.1f}"})
