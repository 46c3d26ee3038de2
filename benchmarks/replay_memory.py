"""`draftwood bench memory`: what a draft and learning cost, by the number of tokens in memory.

The memory is filled with recorded outputs, those of all files in turn, then with their prompts; the last recordings of
each file are kept apart and replayed over it. Without files the text is made up: phrases as frequent as words are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.replay import Recording, TraceError, read_trace, replay
from benchmarks.report import BenchmarkError, OutputOptions, console, progress
from draftwood_client.cli.options import command
from model_runner.errors import InvalidValueError
from strategies import Strategy, create
from strategies.draft import Int32Array
from strategies.registry import options_of

SIZES = (10_000, 100_000, 1_000_000)
_PHRASES, _VOCABULARY, _ZIPF = 20_000, 30_000, 1.2
_TEXT_TOKENS = 300
_LEAST_CAPACITY = 1_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report; figures as in `replay.Replayed`.

    Attributes:
        tokens: how many the memory held before the replay.
    """

    tokens: int
    strategy: str
    budget: int
    draft_us: float
    learn_us_per_token: float
    bytes_per_token: float


@command
def memory(
    output: OutputOptions,
    files: Annotated[
        list[Path] | None, typer.Argument(help="Traces as for replay; without any, text is made up.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="A strategy with a memory of tokens.")] = "trie",
    budget: Annotated[int, typer.Option(min=1, help="Draft nodes a step.")] = 64,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1000, help="Tokens in memory; may be given several times.")
    ] = None,
    measured: Annotated[int, typer.Option(min=1, help="Recordings of each file to replay.")] = 10,
) -> None:
    """Drafting time, learning time and bytes of a strategy with 10,000, 100,000 and 1,000,000 tokens in memory."""
    out = console()
    output.check()
    traces = _read(files or [], measured, max(tokens or SIZES))
    rows = [row_of(strategy, size, budget, traces, measured) for size in progress(tokens or SIZES, "measuring", out)]
    out.print(_table(rows))
    output.write([asdict(row) for row in rows], lambda axes: _draw(rows, axes))


def row_of(name: str, tokens: int, budget: int, traces: Sequence[Sequence[Recording]], measured: int) -> Row:
    """Fills a new memory with `tokens` tokens, and replays the last `measured` recordings of each trace over it.

    Raises:
        BenchmarkError: the traces do not hold as many tokens, or the strategy does not remember any.
        InvalidValueError: there is no such strategy.
    """
    kept = [recording for trace in traces for recording in trace[-measured:]]
    replay(_filled(name, 1000, traces, measured), kept[:1], budget)  # compiles
    strategy = _filled(name, tokens, traces, measured)
    held, size = _tokens(strategy), int(getattr(strategy, "nbytes", 0))
    found = replay(strategy, kept, budget)
    return Row(
        tokens=held,
        strategy=name,
        budget=budget,
        draft_us=round(found.draft_us, 2),
        learn_us_per_token=round(found.learn_us_per_token, 3),
        bytes_per_token=round(size / held, 1),
    )


def made_up(recordings: int, seed: int = 0) -> list[Recording]:
    """Recordings of `_TEXT_TOKENS` tokens whose phrases come back as often as words do (Zipf's law)."""
    random = np.random.default_rng(seed)
    ends = np.cumsum(random.integers(2, 12, _PHRASES))
    book = random.zipf(_ZIPF, ends[-1]).clip(max=_VOCABULARY).astype(np.int32)
    phrases = np.split(book, ends[:-1])
    made = []
    for _ in range(recordings):
        drawn = random.zipf(_ZIPF, _TEXT_TOKENS).clip(max=_PHRASES) - 1
        text = np.concatenate([phrases[at] for at in drawn])[: _TEXT_TOKENS + 1]
        made.append((text[:1], text[1:]))
    return made


def _read(files: list[Path], measured: int, tokens: int) -> list[list[Recording]]:
    if not files:
        return [made_up(tokens // _TEXT_TOKENS + 1 + measured)]
    try:
        return [list(read_trace(path)) for path in files]
    except TraceError as error:
        raise InvalidValueError("FILE", str(error), "it must be a trace") from error


def _filled(name: str, tokens: int, traces: Sequence[Sequence[Recording]], measured: int) -> Strategy:
    """A new strategy that holds `tokens` tokens, or a few more."""
    try:
        # Marks of beginnings and unfinished blocks take room as well.
        capacity = {"capacity_tokens": max(tokens * 5 // 4, _LEAST_CAPACITY)}
        strategy: Any = create(name, **(capacity if "capacity_tokens" in options_of(name) else {}))
    except LookupError as error:
        raise InvalidValueError("strategy", name, str(error)) from error
    if not hasattr(strategy, "learn") or not hasattr(strategy, "tokens"):
        raise BenchmarkError(f"strategy {name!r} keeps no memory of tokens")
    for text in _texts(traces, measured):
        if _tokens(strategy) >= tokens:
            break
        strategy.learn(text[: tokens - _tokens(strategy)])
    if _tokens(strategy) < tokens:
        raise BenchmarkError(f"the recordings fill a memory with {_tokens(strategy)} tokens, not {tokens}")
    return strategy  # type: ignore[no-any-return]


def _texts(traces: Sequence[Sequence[Recording]], measured: int) -> Iterator[Int32Array]:
    """The outputs of all traces in turn, then the prompts."""
    for part in (1, 0):
        for row in zip_longest(*(trace[:-measured] for trace in traces)):
            yield from (recording[part] for recording in row if recording is not None)


def _tokens(strategy: Any) -> int:
    return int(strategy.tokens)


def _table(rows: list[Row]) -> Table:
    table = Table(title="What a memory costs")
    for heading in ("tokens in memory", "strategy", "nodes", "draft us", "learn us/token", "bytes/token"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for row in rows:
        table.add_row(
            f"{row.tokens:,}",
            row.strategy,
            str(row.budget),
            f"{row.draft_us:.1f}",
            f"{row.learn_us_per_token:.2f}",
            f"{row.bytes_per_token:.1f}",
        )
    return table


def _draw(rows: list[Row], axes: Any) -> None:
    sizes = [row.tokens for row in rows]
    for label, values in (
        ("draft (us)", [row.draft_us for row in rows]),
        ("learning (us a token)", [row.learn_us_per_token for row in rows]),
        ("memory (bytes a token)", [row.bytes_per_token for row in rows]),
    ):
        axes.plot(sizes, values, marker="o", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens in memory")
    axes.legend(fontsize=8)
