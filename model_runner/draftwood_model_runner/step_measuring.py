"""Measures what steps cost on this machine, with the model itself on dummy tokens.

What was measured is kept beside a converted model, since it takes seconds of every start.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter

from draftwood_model_runner.runners.base import Runner, StatefulRunner
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_strategies.draft import EMPTY_TREE, DraftTree
from draftwood_strategies.draft_engine.step_times import (
    BLOCK,
    MEASURED_CONTEXT,
    ContextCost,
    MeasuredStepTimes,
    StepTimeCurve,
    measure,
)

_log = logging.getLogger(__name__)
_BATCHED_SEQUENCES = 4
"""Sequences of the step that shows what each further one adds."""
_LONG_CONTEXT, _CONTEXT_TOKENS, _CONTEXT_SECONDS = 1024, 16, 0.1
"""Context and tokens of the steps that show what longer contexts add, and seconds after which no further round of them
begins."""
_CHANGED_SIZES, _ROUNDS = (8, 12), 6
"""Tokens of the steps that show what a change of the size adds, and how often they are run at most."""
_CHANGE_SECONDS = 0.5
"""Seconds after which no further round of these begins: such a cost is part of a millisecond, and a model that takes
longer for four steps does not show it."""
_PATHS, _LEVELS = 4, 4
"""Of the draft tree that shows what branches add; a chain has as many nodes."""
_MIN_COST = 0.02
"""Share of a step from which a change of the size, or a branch, has a cost: less is noise."""
_PADDING_SECONDS, _MIN_PADDING_COST = 1.0, 0.1
"""Seconds after which no further steps show what padding costs, and the share of a step from which it has a cost."""
_LEVEL_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the levels that are timed."""
_LEVEL_SECONDS = 0.3
"""Seconds after which no further round of these begins."""
_LATEST, _LEAST_STEPS = 15, 3
"""Steps of the target, the latest, of whose times the median counts, and of how many at least: single ones wait for the
rest of the machine."""
_SMOOTHING = 0.1
"""Weight of the latest step's levels in what is known of them. Not tuned."""
_KEPT_SECONDS, _FASTER = 0.3, 0.85
"""Seconds after which no further round compares steps with kept times, and how many times as long as these a step takes
that shows them to be of a machine that was busy."""

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """What steps cost: the arguments of `MeasuredStepTimes`, with the seconds by tokens in place of their curve."""

    seconds: Annotated[dict[Annotated[int, Field(ge=1)], _Positive], Field(min_length=1)]
    per_sequence: _Cost
    per_context: ContextCost
    per_draft: _Cost
    per_change: _Cost
    per_branch: _Cost
    per_padding: _Cost

    def times(self, factor: float = 1.0) -> MeasuredStepTimes:
        """The step-time model of a machine whose steps take `factor` times as long."""
        return MeasuredStepTimes(
            StepTimeCurve({size: factor * seconds for size, seconds in self.seconds.items()}),
            factor * self.per_sequence,
            ContextCost(*(factor * cost for cost in self.per_context)),
            factor * self.per_draft,
            factor * self.per_change,
            factor * self.per_branch,
            factor * self.per_padding,
        )


_KEPT = TypeAdapter(tuple[str, MeasuredSteps])
"""The machine, and what steps cost there."""


def known_step_times(
    runner: Runner, max_context: int, largest: int, file: Path | None, machine: str
) -> MeasuredStepTimes:
    """What steps cost, by what an earlier start kept if there is such a thing, else measured and kept.

    Kept times are of the fastest steps that a start has seen: where some steps are faster now, the machine was busy
    then, and all are measured again. Where they are slower it is busy now, and the kept ones are scaled, since what is
    measured beside other work has other proportions.

    Args:
        largest: tokens of one sequence up to which it is measured.
        file: where it is kept, in a folder that belongs to the model; None for nowhere.
        machine: a name for all that step times depend on beside the model.
    """
    machine = f"{machine}, {largest} tokens"
    if file is not None and (kept := _read(file, machine)) is not None:
        factor = _factor(runner, max_context, kept)
        if factor >= _FASTER:
            return kept.times(factor)
    measured = measure_steps(runner, max_context, largest)
    if file is not None:
        _write(file, machine, measured)
    return measured.times()


def _read(file: Path, machine: str) -> MeasuredSteps | None:
    """The times of a file; None if there is none, or they are of another machine."""
    try:
        measured_on, steps = _KEPT.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("step times are measured again, those in %s are not used: %s", file, error)
        return None
    return steps if measured_on == machine else None


def _write(file: Path, machine: str, steps: MeasuredSteps) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        part.write_bytes(_KEPT.dump_json((machine, steps)))
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        _log.warning("step times are not kept, so the next start measures them again: %s", error)


def _factor(runner: Runner, max_context: int, kept: MeasuredSteps) -> float:
    """How many times as long as the kept ones the fastest steps of three sizes take now, the least of them."""
    sizes = sorted(kept.seconds)
    few = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    step = _timed_step(runner, min(MEASURED_CONTEXT, max_context // 2), few[-1])
    step(few[-1])  # the first run of all pays for allocations
    taken = _fastest([partial(step, size) for size in few for _ in range(2)], _KEPT_SECONDS)[1::2]
    return min(seconds / kept.seconds[size] for size, seconds in zip(few, taken, strict=True))


def measure_steps(runner: Runner, max_context: int, largest: int) -> MeasuredSteps:
    """What tokens cost, up to `largest` of one sequence, and what each further sequence and longer contexts add.

    Takes a second or two, or four where a step takes tens of milliseconds.
    """
    curve = measure_curve(runner, max_context, largest, limit=1.0)
    several = measure_curve(runner, max_context, 2, limit=0.2, sequences=_BATCHED_SEQUENCES)
    single, double = several.at(1) - curve.at(_BATCHED_SEQUENCES), several.at(2) - curve.at(2 * _BATCHED_SEQUENCES)
    per_sequence, per_draft = (
        max(more, 0.0) / (_BATCHED_SEQUENCES - 1) for more in (single, double - max(single, 0.0))
    )
    changing = _change_cost(runner, max_context)
    branching = _branch_cost(runner, max_context)
    of_context = _context_cost(runner, max_context, curve)
    padding = _padding_cost(runner, max_context)
    return MeasuredSteps(
        seconds=dict(zip(curve.sizes.astype(int).tolist(), curve.seconds.tolist(), strict=True)),
        per_sequence=per_sequence,
        per_context=of_context,
        per_draft=per_draft,
        per_change=changing,
        per_branch=branching,
        per_padding=padding,
    )


def measure_curve(
    runner: Runner,
    max_context: int,
    largest: int,
    *,
    limit: float,
    context: int = MEASURED_CONTEXT,
    sequences: int = 1,
) -> StepTimeCurve:
    """What a step costs by the number of tokens of each sequence.

    Args:
        max_context: of the model; `context` is cut to half of it, and `largest` to the rest.
        limit: seconds after which no further round of measurements begins.
        context: committed tokens of each sequence.
        sequences: how many share the step.
    """
    context = min(context, max_context // 2)
    largest = min(largest, max_context - context)
    return measure(_timed_step(runner, context, largest, sequences), largest, limit)


def _timed_step(runner: Runner, context: int, largest: int, sequences: int = 1) -> Callable[[int], float]:
    """A function that runs a step in which each sequence has so many tokens, at most `largest`, behind `context`
    committed ones, and returns the seconds that it took."""
    needed = np.arange(-(-(context + largest) // runner.page_size), dtype=np.int32)
    # What is in the pages makes no difference, so that in a small memory sequences may have some in common.
    tables = [(needed + i * needed.size) % runner.pages for i in range(sequences)]

    def seconds(size: int) -> float:
        tokens = np.zeros(size, np.int32)
        return _seconds(runner, [BatchRow(pages, context, tokens, EMPTY_TREE, logits_from=0) for pages in tables])

    return seconds


def _seconds(runner: Runner, rows: SequenceOf[BatchRow]) -> float:
    """What a step on dummy contexts takes."""
    batch = replace(lay_out(rows), is_dummy=True, exact_top_k=1, reads_features=False)
    started = time.perf_counter()
    runner.step(batch, 0)
    return time.perf_counter() - started


def _change_cost(runner: Runner, max_context: int) -> float:
    """Seconds that a step takes longer after one of another size."""
    context = min(MEASURED_CONTEXT, max_context // 2)
    if max_context - context < max(_CHANGED_SIZES):
        return 0.0
    step = _timed_step(runner, context, max(_CHANGED_SIZES))
    fastest = _fastest([partial(step, size) for size in _CHANGED_SIZES for _ in range(2)], _CHANGE_SECONDS)
    changed, same = fastest[::2], fastest[1::2]
    more = (sum(changed) - sum(same)) / len(_CHANGED_SIZES)
    return more if more > _MIN_COST * min(same) else 0.0


def _fastest(steps: SequenceOf[Callable[[], float]], limit: float = float("inf")) -> list[float]:
    """The least seconds that each of some steps takes, which are run in turn.

    Args:
        limit: seconds after which no further round begins.
    """
    fastest, deadline = [float("inf")] * len(steps), time.perf_counter() + limit
    for _ in range(_ROUNDS):
        fastest = [min(seconds, step()) for seconds, step in zip(fastest, steps, strict=True)]
        if time.perf_counter() > deadline:
            break
    return fastest


def _padding_cost(runner: Runner, max_context: int) -> float:
    """Seconds that each unused row of a second block of tokens takes, see `MeasuredStepTimes`."""
    context = min(MEASURED_CONTEXT, max_context // 2)
    if max_context - context <= BLOCK:
        return 0.0
    step = _timed_step(runner, context, BLOCK + 1)
    step(BLOCK + 1)  # the first run of all pays for allocations
    full, one_more = _fastest([partial(step, BLOCK), partial(step, BLOCK + 1)], _PADDING_SECONDS)
    more = one_more - full * (BLOCK + 1) / BLOCK
    return more / (BLOCK - 1) if more > _MIN_PADDING_COST * full else 0.0


def _branch_cost(runner: Runner, max_context: int) -> float:
    """Seconds that a path adds to a draft of as many nodes, for a runner whose recurrent layers may go path by path."""
    if not isinstance(runner, StatefulRunner) or runner.states is None or not runner.draft_limits(0).branches:
        return 0.0
    nodes = _PATHS * _LEVELS
    context = min(MEASURED_CONTEXT, max_context - nodes - 1)
    if context < 1:
        return 0.0
    pages = np.arange(-(-(context + nodes + 1) // runner.page_size), dtype=np.int32) % runner.pages
    level = np.arange(nodes, dtype=np.int32) // _PATHS
    tree = DraftTree.of(np.arange(nodes, dtype=np.int32), np.where(level > 0, np.arange(nodes) - _PATHS, -1))
    last = np.zeros(1, np.int32)
    rows = [BatchRow(pages, context, last, draft, logits_from=0) for draft in (DraftTree.of(tree.tokens), tree)]
    chain, paths = _fastest([partial(_seconds, runner, [row]) for row in rows])
    more = (paths - chain) / (_PATHS - 1)
    return more if more > _MIN_COST * chain else 0.0


def _context_cost(runner: Runner, max_context: int, curve: StepTimeCurve) -> ContextCost:
    """What positions beyond the measured context add, from two sizes of step with a longer one."""
    beyond = min(_LONG_CONTEXT, max_context // 2) - MEASURED_CONTEXT
    tokens = min(_CONTEXT_TOKENS, max_context // 2)
    if beyond < MEASURED_CONTEXT or tokens < 2:
        return ContextCost()
    step = _timed_step(runner, MEASURED_CONTEXT + beyond, tokens)
    step(tokens)  # the first run of all pays for allocations
    sizes = (1, tokens)
    long = _fastest([partial(step, size) for size in sizes for _ in range(2)], _CONTEXT_SECONDS)[1::2]
    single, several = (max(seconds - curve.at(n), 0.0) / beyond for n, seconds in zip(sizes, long, strict=True))
    per_token = max(several - single, 0.0) / (tokens - 1)
    return ContextCost(per_sequence=max(single - per_token, 0.0), per_token=per_token)


class LevelShares:
    """What a level of a model's drafts costs as a share of a step of the target, by the rows of the step.

    With many rows a level takes longer, and so does a step that verifies a node more of each. Both are measured at
    start, since a level that is not asked for shows nothing, and shares are corrected by the steps that have levels.

    Args:
        step_times: of the target; None where all drafts are verified: then nodes cost nothing.
        shares: by rows, of a level alone; none if unknown.

    Attributes:
        rows: of the step that is drafted for.
    """

    def __init__(
        self, step_times: MeasuredStepTimes | None = None, shares: Mapping[int, float] = MappingProxyType({})
    ) -> None:
        self.rows = 1
        self._step_times = step_times
        self._of_rows = np.array([*shares] or [*_LEVEL_ROWS], np.float64)
        self._shares = np.array([*shares.values()] or [0.0] * len(_LEVEL_ROWS))
        self._latest = deque[float](maxlen=_LATEST)
        self._latest_rows = 0

    @classmethod
    def measured(cls, level: Callable[[int], float], step_times: MeasuredStepTimes, most_rows: int) -> LevelShares:
        """Those of `level(n)`, which computes a level of n rows and returns the seconds that it took."""
        rows = [n for n in _LEVEL_ROWS if n < most_rows] + [min(most_rows, _LEVEL_ROWS[-1])]
        level(rows[-1])  # the first run of all pays for allocations
        seconds = _fastest([partial(level, n) for n in rows for _ in range(2)], _LEVEL_SECONDS)[1::2]
        return cls(step_times, {n: taken / step_times.at(n, n) for n, taken in zip(rows, seconds, strict=True)})

    def at(self, rows: int | None = None) -> float:
        """The share of a level and of verifying one more node of each row, see `ModelSource.level_share`. The first
        node, which may cost more, others draft as well."""
        rows = self.rows if rows is None else rows
        share = float(np.interp(rows, self._of_rows, self._shares))
        if self._step_times is None:
            return share
        plain, one, two = (self._step_times.at(n * rows, rows) for n in (1, 2, 3))
        return share + (two - one) / plain

    def observe_step(self, rows: int, seconds: float) -> None:
        """A step of the target that only decoded took so long."""
        if rows != self._latest_rows:
            self._latest.clear()
            self._latest_rows = rows
        self._latest.append(seconds)

    def observe_level(self, seconds: float) -> None:
        """A level of the step that is drafted for took so long."""
        if self.rows != self._latest_rows or len(self._latest) < _LEAST_STEPS:
            return
        share = seconds / median(self._latest)
        if not self._shares.any():
            self._shares[:] = share
        nearest = int(np.abs(np.log(self._of_rows / self.rows)).argmin())
        before = self._shares[nearest]
        self._shares[nearest] += _SMOOTHING * (min(max(share, before / 2), 2 * before) - before)
