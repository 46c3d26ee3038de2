"""`draftwood bench replay`: how many draft tokens would be accepted in recorded outputs, without running a model.

A strategy that reads only token ids proposes the same drafts in a replay as with the model that wrote the trace. Each
step drafts a tree; the longest path that the recorded output follows is accepted, plus the one token that the model's
own forward pass adds. The memory starts empty and grows over the trace. All strategies write the same tokens, so they
differ in the number of steps alone, and in the levels of a draft model's trees (`replay_beside_model`); the differences
are paired by answer, and their interval comes from resampling answers.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import typer
from numpy.typing import ArrayLike, NDArray

from draftwood_benchmarks.harness.models import ModelOptions, choose_model
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, Rows, console, progress, table
from draftwood_benchmarks.peers.process import running_program
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidInputError
from draftwood_strategies import DraftTree, Strategy, create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.tree_index import NO_NODE

Recording: TypeAlias = tuple[Int32Array, Int32Array]
"""A prompt int32[p] and the output that followed it int32[o], neither empty."""
_Replaying: TypeAlias = "Callable[[Strategy, Iterable[Recording], int], Replayed]"
NEEDS_MODEL = "reads the model's most probable tokens, which recordings lack; here it drafts from token ids alone"
_PEER_TIMEOUT = 3600.0
_RESAMPLES, _AT_ONCE = 4000, 200
"""Of the answers, and how many are drawn at once, which affects memory only."""


@command
def replay_command(
    model: ModelOptions,
    output: OutputOptions,
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Traces: JSON lines with prompt_ids and output_ids, or files of `draftwood memory export`; or .gz."
        ),
    ],
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,OPTION=VALUE]...",
            help="A strategy and its options; may be given several times: the first is what the others are compared"
            " with. trie by default.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Draft nodes per step; may be given several times. 16 and 64 by default."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each file.")] = None,
    peer: Annotated[
        Literal["sglang"] | None,
        typer.Option(help="Also the trie of SGLang's n-gram drafts; `make peers` installs it."),
    ] = None,
    level_share: Annotated[
        float, typer.Option(min=0, max=10, help="Time of a level of a model's draft, as a share of a step.")
    ] = 0.1,
) -> None:
    """Replay strategies over recorded outputs: tokens per step, drafting and learning time, memory per token. With
    --model, which wrote the outputs, its head and its draft model draft too: strategies head, draft_model and hybrid.
    """
    strategies, budgets = [*dict.fromkeys(strategy or ["trie"])], budget or [16, 64]
    traces = {trace_name(path): list(read_trace(path, limit)) for path in files}
    lengths = [answer.size - 1 for recordings in traces.values() for _, answer in recordings]
    if not sum(lengths):
        raise BenchmarkError("no recorded output has a second token, so there is no step to compare")
    cases = [(name, nodes) for name in traces for nodes in budgets]
    with _replaying(model, max(budgets), level_share) as replaying:
        needing = [text for text in strategies if created(text).top_k and model.model is None]
        ours = {
            (*case, text): _replayed(replaying, text, traces[case[0]], case) for case in cases for text in strategies
        }
    theirs = _sglang(traces, cases) if peer else {}
    rows: Rows = []
    for case in cases:
        of_case = {text: ours[*case, text] for text in strategies} | ({"sglang": theirs[case]} if peer else {})
        first = next(iter(of_case.values()))
        for text, found in of_case.items():
            rows.append({"trace": case[0], "strategy": text, "budget": case[1], **found.row(level_share)})
            rows[-1] |= _change(first, found, level_share)
    several = len(strategies) > 1 or peer is not None
    spans = [None if row["low"] is None else f"{row['low']:+.1%} to {row['high']:+.1%}" for row in rows]
    columns = {"trace": "{trace}", "strategy": "{strategy}", "nodes": "{budget}", "drafted": "{drafted_per_step:.2f}"}
    columns |= {"tokens/step": "{acceptance_length:.3f}"}
    beside = model.model is not None
    columns |= {"levels": "{levels_per_step:.2f}", "speed": "{speed:.3f}"} if beside else {}
    columns |= {"change": "{change:+.1%}", "95% interval": "{span}"} if several else {}
    columns |= (
        {}
        if beside
        else {"draft us": "{draft_us:.1f}", "learn us": "{learn_us_per_token:.2f}", "bytes": "{bytes_per_token:.0f}"}
    )
    title = f"{len(lengths):,} recorded answers, {sum(lengths):,} tokens in steps"
    caption = f"drafted: a step; {'change: of tokens in a step; ' if several else ''}learn us, bytes: of a token"
    if beside:
        caption = (
            f"speed, change: tokens in the time of a step, of which a level of a model's draft takes {level_share:g}"
        )
    shown = [row | {"span": span} for row, span in zip(rows, spans, strict=True)]
    output.report(table(title, shown, columns, texts=2, caption=caption), rows)
    for text in needing:
        console.print(f"{text} {NEEDS_MODEL}.")


@contextmanager
def _replaying(options: ModelOptions, largest: int, level_share: float) -> Iterator[_Replaying]:
    """What replays; with a model there are the strategies that draft by what is beside it."""
    if options.model is None:
        if options.draft_model is not None:
            raise InvalidInputError("--draft-model", options.draft_model, "--model must say beside which model")
        yield replay
        return
    chosen = choose_model(options)
    with console.status("Loading the model"):
        from draftwood_benchmarks.replay_beside_model import ModelReplay

        beside = ModelReplay(chosen.load(), largest)
    with beside.strategies(level_share):
        yield beside.replay


def _replayed(replaying: _Replaying, text: str, recordings: Sequence[Recording], case: tuple[str, int]) -> Replayed:
    name, nodes = case
    replaying(created(text), recordings[:1], nodes)  # compiles
    return replaying(created(text), progress(recordings, f"{name}, {nodes} nodes, {text}"), nodes)


def _sglang(
    traces: Mapping[str, Sequence[Recording]], cases: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], Replayed]:
    """SGLang's trie by trace and draft nodes; it counts the last written token as one more node. Raises PeerError."""
    found = {}
    with running_program("sglang", "sglang_replay") as program:
        for name, nodes in cases:
            lists = [[prompt.tolist(), output.tolist()] for prompt, output in traces[name]]
            request = {"op": "replay", "nodes": nodes + 1, "recordings": lists}
            found[name, nodes] = Replayed(**program.ask(request, _PEER_TIMEOUT))
    return found


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay.

    Attributes:
        steps: decoding steps of each answer, each one forward pass of the model. The first token of an output comes
            from the prefill, which is not counted.
        tokens: tokens written in the steps.
        drafted: draft tokens verified in them.
        draft_us: median time of a draft, in microseconds; None beside a model.
        learn_us_per_token: time in `start`, `observe` and `close` per token of prompts and outputs, in microseconds;
            None if a peer does not tell.
        bytes_per_token: size of the strategy's memory per token in it; None if it has no `nbytes`.
        levels: of each answer's drafts by a model; none without one.
    """

    steps: Sequence[int]
    tokens: int
    drafted: int = 0
    draft_us: float | None = 0.0
    learn_us_per_token: float | None = None
    bytes_per_token: float | None = None
    levels: Sequence[int] = ()

    def times(self, level_share: float) -> NDArray[np.float64]:
        """Of each answer, in steps, of which a level takes a share."""
        steps = np.array(self.steps, np.float64)
        return steps + level_share * np.array(self.levels) if self.levels else steps

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step."""
        return self.tokens / sum(self.steps) if sum(self.steps) else 1.0

    def row(self, level_share: float) -> dict[str, Any]:
        """The columns of the report. "speed" is tokens in the time of a step."""
        steps, took = max(1, sum(self.steps)), float(self.times(level_share).sum())
        figures = {
            "acceptance_length": self.acceptance_length,
            "draft_us": self.draft_us,
            "learn_us_per_token": self.learn_us_per_token,
            "bytes_per_token": self.bytes_per_token,
            "drafted_per_step": self.drafted / steps,
            "levels_per_step": sum(self.levels) / steps,
            "speed": self.tokens / took if took else 1.0,
        }
        return {name: None if value is None else round(value, 4) for name, value in figures.items()}


def _change(first: Replayed, other: Replayed, level_share: float) -> dict[str, float | None]:
    """Relative change of "speed", 0.1 being 10% more, and its 95% interval; None of the first itself."""
    if other is first:
        return dict.fromkeys(("change", "low", "high"))
    control, taken = first.times(level_share), other.times(level_share)
    low, high = interval(control, taken)
    return {"change": float(control.sum() / taken.sum() - 1.0), "low": low, "high": high}


def interval(control: ArrayLike, treatment: ArrayLike, seed: int = 0) -> tuple[float, float]:
    """95% percentile-bootstrap interval of the relative change of the tokens in a given time.

    Args:
        control, treatment: time of the same answers in steps; those without a step say nothing.
        seed: of the resampling.
    """
    random, changes = np.random.default_rng(seed), []
    both = np.stack([control, treatment], axis=1)
    both = both[both[:, 0] > 0]
    for _ in range(_RESAMPLES // _AT_ONCE):
        times_drawn = random.multinomial(len(both), np.full(len(both), 1.0 / len(both)), size=_AT_ONCE)
        sums = times_drawn @ both
        changes.append(sums[:, 0] / sums[:, 1] - 1.0)
    low, high = np.percentile(np.concatenate(changes), [2.5, 97.5])
    return float(low), float(high)


def created(text: str) -> Strategy:
    """A new strategy of `--strategy`. Raises InvalidInputError: it cannot be made."""
    name, *settings = text.split(",")
    options = dict(setting.split("=", 1) for setting in settings if "=" in setting)
    if len(options) != len(settings):
        raise InvalidInputError("--strategy", text, "it must be NAME[,OPTION=VALUE]..., each option once")
    try:
        return create(name, **{key: _value(value) for key, value in options.items()})
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidInputError("--strategy", text, str(error)) from error


def _value(text: str) -> Any:
    """A number, true or false, as in JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def accepted_length(tree: DraftTree, continuation: Int32Array) -> int:
    """Length of the longest path of the tree that `continuation`, int32[n], begins with."""
    children = {edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    node, length = NO_NODE, 0
    for token in continuation.tolist():
        child = children.get((node, token))
        if child is None:
            break
        node, length = child, length + 1
    return length


def replay(strategy: Strategy, recordings: Iterable[Recording], budget: int) -> Replayed:
    """Replays the recordings in order, with at most `budget` draft nodes per step; `strategy` learns from each."""
    clock = time.perf_counter
    steps, drafting, learning = list[int](), list[float](), 0.0
    tokens = drafted = seen = 0
    for prompt, output in recordings:
        seen += prompt.size + output.size
        before = clock()
        drafter = strategy.start(prompt)
        drafter.observe(output[:1], None)
        learning += clock() - before
        steps.append(0)
        at = 1
        while at < output.size:
            before = clock()
            tree = drafter.propose(budget)
            drafting.append(clock() - before)
            written = output[at : at + accepted_length(tree, output[at:]) + 1]
            before = clock()
            drafter.observe(written, None)
            learning += clock() - before
            steps[-1] += 1
            at += written.size
            drafted += tree.tokens.size  # a plugin's tree need not be a DraftTree
        tokens += output.size - 1
        before = clock()
        drafter.close()
        learning += clock() - before
    stored = getattr(strategy, "tokens", 0)
    return Replayed(
        steps=steps,
        tokens=tokens,
        drafted=drafted,
        draft_us=statistics.median(drafting) * 1e6 if drafting else 0.0,
        learn_us_per_token=learning / seen * 1e6 if seen else 0.0,
        bytes_per_token=getattr(strategy, "nbytes", 0) / stored if stored else None,
    )


_EXPORT = "draftwood_memory"
"""Key of the first line of an exported memory."""


class TraceError(InvalidInputError):
    """A trace cannot be read; the message names the file, the line and the problem."""

    def __init__(self, path: Path, problem: object) -> None:
        super().__init__("FILE", path, str(problem))


def read_trace(path: Path, limit: int | None = None) -> Iterator[Recording]:
    """The first `limit` recordings of a trace.

    Raises:
        TraceError: the file cannot be read, or a line is not a recording; an export has no answer of two tokens.
    """
    return islice(_recordings(path), limit)


def _recordings(path: Path) -> Iterator[Recording]:
    exported, recordings = False, 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = _row(line, path, number)
                if number == 1 and _EXPORT in row:
                    exported = True
                elif not exported:
                    yield _ids(row, "prompt_ids", path, number), _ids(row, "output_ids", path, number)
                elif row.get("kind") == "output" and (ids := _ids(row, "token_ids", path, number)).size > 1:
                    recordings += 1
                    yield ids[:1], ids[1:]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(path, error) from error
    if exported and not recordings:
        raise TraceError(path, "the exported memory has no answer of two tokens or more")


def _row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(path, f"line {number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise TraceError(path, f"line {number}: not an object")
    return row


def _ids(row: Mapping[str, object], name: str, path: Path, number: int) -> Int32Array:
    try:
        ids = np.array(row.get(name), np.int32)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty(0, np.int32)
    if ids.ndim != 1 or ids.size == 0 or ids.min() < 0:
        raise TraceError(path, f"line {number}: {name} must be a list of one or more ids of at least 0")
    return ids


def trace_name(path: Path) -> str:
    """The file's name without `.jsonl` and `.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
