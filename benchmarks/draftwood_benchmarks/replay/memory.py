"""`draftwood bench memory`: drafting time, learning time and size of a strategy by the number of tokens in its memory.

The memory is filled with recorded outputs, alternating between the files, then with their prompts. The last recordings
of each file are left out and replayed over it. Without files the text is synthetic: phrases with a Zipf distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, Rows, progress, table
from draftwood_benchmarks.replay.replay import created, replay
from draftwood_benchmarks.replay.trace import Recording, read_trace
from draftwood_client.cli.options import command
from draftwood_strategies import Strategy, strategy_names
from draftwood_strategies.draft import Int32Array
from draftwood_strategies.registry import options_of

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
    found = replay(strategy, kept, budget)
    return {
        "tokens": held,
        "strategy": name,
        "budget": budget,
        "draft_us": round(found.draft_us, 2),
        "learn_us_per_token": round(found.learn_us_per_token, 3),
        "bytes_per_token": round(size / held, 1),
    }


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
