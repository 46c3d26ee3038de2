"""The step-time model: what a step costs, measured at start and corrected by every step.

A step costs what a measured curve gives for its number of tokens; every further sequence adds its own attention calls,
and every position of context beyond the measured one adds to those. Steps themselves show what wider ones cost than any
measured at start, the drafts of many sequences together, and how far the load of another process moves it all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numba
import numpy as np
import numpy.typing as npt

from draftwood_strategies.native import compiled

MEASURED_CONTEXT = 128
"""Committed tokens that a step attends to when curves are measured, in the tokens of each sequence."""
KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes that are timed, in tokens."""
_ROUNDS = 8
_LONG_STEP = 0.1
"""Seconds from which a step is timed at its first run."""
_RETRIES = 2
"""How often a size is timed again that took longer than a larger one."""
_MAX_TOKENS = 8192
"""Tokens of a step up to which its cost is learned."""
_SMOOTHING, SMOOTHING_EVERYWHERE = 0.05, 0.025
"""Share of an error that corrects the curve near its size and everywhere. Found with `bench load` beside a busy
process; half or twice as much made no measurable difference."""
_TABLE_SIZE = 1024
"""Tokens of a step up to which its cost is looked up, and not computed: most are narrower."""
BLOCK = 64
"""Tokens that the kernels of a step may compute at once, see `MeasuredStepTimes.per_padding`."""
_MIN_SHARE = 0.1
"""Share of an error that is attributed to further sequences at least; else a cost once measured as 0 would stay 0."""

Seconds = npt.NDArray[np.float64]
StepSeconds = Callable[[int, int], Seconds]
"""(n, m) -> seconds that a step takes with n, n + 1, ... m tokens, float64[m - n + 1]."""


class StepSize(NamedTuple):
    """The size of a step.

    Attributes:
        tokens: of all its sequences, drafts included.
        sequences: how many share it.
        context: committed tokens that each token attends to, on average.
        drafts: how many sequences have one.
        branches: paths of its draft trees beside the first ones.
        changed: the step before had another number of tokens.
    """

    tokens: int
    sequences: int
    context: int = MEASURED_CONTEXT
    drafts: int = 0
    branches: int = 0
    changed: bool = False


class StepTimes(Protocol):
    """What a step costs, corrected by each step.

    Attributes:
        per_draft, per_change, per_branch: seconds beside those of tokens, see `MeasuredStepTimes`; 0 if unknown.
    """

    per_draft: float
    per_change: float
    per_branch: float

    def between(self, fewest: int, most: int, sequences: int, context: int = MEASURED_CONTEXT) -> Seconds:
        """Seconds for `fewest` tokens, one more, and so on to `most`, float64[most - fewest + 1].

        Args:
            sequences: how many share the step.
            context: committed tokens that each token attends to, on average.
        """

    def observe(self, size: StepSize, seconds: float) -> None:
        """A step of this size took so long."""

    def known(self, sequences: int) -> bool:
        """Whether seconds of steps of about so many sequences mean something; before, only ratios do."""

    def probes(self, sequences: int) -> bool:
        """Whether the next step, of so many sequences, is to have no drafts, to show what that takes."""


class StepTimeCurve:
    """Seconds that one forward pass takes over n tokens: linear between measured sizes.

    Two invariants that noise must not violate: more tokens never take less time, and never more time a token.

    Args:
        seconds: size -> measured seconds; at least one size.
    """

    def __init__(self, seconds: dict[int, float]) -> None:
        self.sizes = np.array(sorted(seconds), np.float64)
        measured = np.array([seconds[int(n)] for n in self.sizes], np.float64)
        per_token = np.minimum.accumulate(measured / self.sizes)
        self.seconds = np.maximum.accumulate(per_token * self.sizes)
        self._table = np.empty(int(min(self.sizes[-1], _TABLE_SIZE)) + 1)
        _tabulate(self.sizes, self.seconds, self._table)

    def widened(self, widest: int = _MAX_TOKENS) -> StepTimeCurve:
        """The same curve with sizes up to `widest`, each twice the one before, to be corrected.

        It goes on there as steeply as the steepest line to its end: the cost of a step does not flatten out.
        """
        seconds = dict(zip(self.sizes.astype(int).tolist(), self.seconds.tolist(), strict=True))
        largest = last = int(self.sizes[-1])
        while last < widest:
            last *= 2
            seconds[last] = float(self(last))
        return self if last == largest else StepTimeCurve(seconds)

    def __call__(self, tokens: npt.ArrayLike) -> Seconds:
        """Seconds for each number of tokens; beyond the largest size, along the steepest line from there to another."""
        tokens = np.asarray(tokens)
        at = np.interp(tokens, self.sizes, self.seconds)
        if len(self.sizes) > 1:
            slopes = (self.seconds[-1] - self.seconds[:-1]) / (self.sizes[-1] - self.sizes[:-1])
            at = at + slopes.max() * np.maximum(tokens - self.sizes[-1], 0)
        return np.asarray(at)

    def between(self, fewest: int, most: int) -> Seconds:
        """Seconds for `fewest` tokens, one more, and so on to `most`."""
        return self._table[fewest : most + 1] if most < self._table.size else self(np.arange(fewest, most + 1))

    def at(self, tokens: int) -> float:
        """Seconds for one number of tokens."""
        return float(self._table[tokens] if tokens < self._table.size else self(tokens))

    def correct(self, tokens: int, error: float, near: float = _SMOOTHING) -> None:
        """Moves the curve towards a step that took 1 + `error` times what was expected: a little everywhere, and more
        at the two sizes about it, by the share `near`, the nearer the more. Sizes that no step had follow as far as
        the invariants require."""
        _correct(self.sizes, self.seconds, self._table, tokens, error, near)


@compiled
def _tabulate(sizes: Seconds, seconds: Seconds, table: Seconds) -> None:
    """Sets the table to the seconds for 0, 1, ... tokens: on the lines between the sizes, level below the smallest."""
    at = 0
    for tokens in range(table.shape[0]):
        while at + 1 < sizes.shape[0] and tokens > sizes[at + 1]:
            at += 1
        if tokens <= sizes[at] or at + 1 == sizes.shape[0]:
            table[tokens] = seconds[at]
        else:
            slope = (seconds[at + 1] - seconds[at]) / (sizes[at + 1] - sizes[at])
            table[tokens] = seconds[at] + slope * (tokens - sizes[at])


@compiled
def _move(sizes: Seconds, seconds: Seconds, at: int, factor: float) -> None:
    """Multiplies one size's seconds; the others follow as far as the invariants require."""
    here = seconds[at] * factor
    for i in range(sizes.shape[0]):
        ratio = sizes[i] / sizes[at]
        seconds[i] = min(max(seconds[i], here * min(ratio, 1.0)), here * max(ratio, 1.0))
    seconds[at] = here


@numba.njit("void(float64[::1], float64[::1], float64[::1], int64, float64, float64)", cache=True, nogil=True)
def _correct(sizes: Seconds, seconds: Seconds, table: Seconds, tokens: int, error: float, near: float) -> None:
    """`StepTimeCurve.correct`, in place. Compiled, since every step corrects the curve."""
    for i in range(sizes.shape[0]):
        seconds[i] *= 1.0 + SMOOTHING_EVERYWHERE * error
    at = 0
    while at + 1 < sizes.shape[0] and sizes[at + 1] <= tokens:
        at += 1
    share = 0.0  # of the next size
    if at + 1 < sizes.shape[0] and tokens > sizes[at]:
        share = (tokens - sizes[at]) / (sizes[at + 1] - sizes[at])
        _move(sizes, seconds, at + 1, 1.0 + share * (near - SMOOTHING_EVERYWHERE) * error)
    _move(sizes, seconds, at, 1.0 + (1.0 - share) * (near - SMOOTHING_EVERYWHERE) * error)
    _tabulate(sizes, seconds, table)


class ContextCost(NamedTuple):
    """Seconds for each position of context beyond the `MEASURED_CONTEXT` that a curve was measured with.

    Attributes:
        per_sequence: for each sequence of the step, which reads the keys and values of its context.
        per_token: for each token of the step, which attends to them.
    """

    per_sequence: float = 0.0
    per_token: float = 0.0


_NO_COST = ContextCost()


class MeasuredStepTimes:
    """`StepTimes` of an engine that can be measured before it serves.

    Args:
        curve: of a step of one sequence.
        per_sequence: seconds that every further sequence adds.
        per_context: what longer contexts add.
        per_draft: seconds that every further sequence adds which has a draft, beside its tokens: kernels of attention
            for several tokens of a sequence may cost more than the one for a single token.
        per_change: seconds that a step takes longer after one of another number of tokens: OpenVINO prepares each
            operation again for other shapes.
        per_branch: seconds that each path of a draft tree after the first one adds, beside its nodes.
        per_padding: what each token adds that a step of more than `BLOCK` tokens lacks to a multiple of it: oneDNN
            computes wide matrices, such as the output head, in whole blocks of 64 rows from the second block on. So 65
            tokens may take as long as 128.
    """

    def __init__(
        self,
        curve: StepTimeCurve,
        per_sequence: float = 0.0,
        per_context: ContextCost = _NO_COST,
        per_draft: float = 0.0,
        per_change: float = 0.0,
        per_branch: float = 0.0,
        per_padding: float = 0.0,
    ) -> None:
        self.per_draft = per_draft
        self.per_change = per_change
        self.per_branch = per_branch
        self.per_padding = per_padding
        self._curve = curve.widened()
        self._per_sequence = per_sequence
        self._per_context = per_context

    def between(self, fewest: int, most: int, sequences: int, context: int = MEASURED_CONTEXT) -> Seconds:
        costs = self._curve.between(fewest, most)
        if self.per_padding and most > BLOCK:
            sizes = np.arange(fewest, most + 1)
            costs = costs + self.per_padding * (-sizes % BLOCK) * (sizes > BLOCK)
        if sequences == 1 and context <= MEASURED_CONTEXT:
            return costs
        of_context = self._of_context(np.arange(fewest, most + 1), sequences, context)
        return np.asarray(costs + (sequences - 1) * self._per_sequence + of_context)

    def at(self, tokens: int, sequences: int, context: int = MEASURED_CONTEXT) -> float:
        """Seconds for one number of tokens, see `between`."""
        of_context = float(self._of_context(tokens, sequences, context))
        return self._curve.at(tokens) + self._padding(tokens) + (sequences - 1) * self._per_sequence + of_context

    def observe(self, size: StepSize, seconds: float) -> None:
        """Corrects the model by a step."""
        tokens, sequences, context = size.tokens, size.sequences, size.context
        padding = self._padding(tokens)
        seconds -= max(size.drafts - 1, 0) * self.per_draft + size.changed * self.per_change
        seconds -= size.branches * self.per_branch + padding
        extra = (sequences - 1) * self._per_sequence
        expected = self.at(tokens, sequences, context) - padding
        # A step far from what was expected met the load of another process, not another curve.
        error = min(max(seconds / expected, 0.5), 2.0) - 1.0
        share = float(self._of_context(tokens, sequences, context)) / expected
        self._curve.correct(tokens, error * (1.0 - share))
        if share:
            factor = 1.0 + _SMOOTHING * error * share
            self._per_context = ContextCost(*(factor * cost for cost in self._per_context))
        if sequences > 1:
            attributed = max(extra, _MIN_SHARE * expected)
            self._per_sequence = max(0.0, extra + _SMOOTHING * error * attributed) / (sequences - 1)

    def known(self, sequences: int) -> bool:
        return True

    def probes(self, sequences: int) -> bool:
        return False

    def _padding(self, tokens: int) -> float:
        """Seconds that unused rows of the last block add."""
        return self.per_padding * (-tokens % BLOCK) if tokens > BLOCK else 0.0

    def _of_context(self, tokens: int | npt.NDArray[np.int64], sequences: int, context: int) -> Any:
        """Seconds that contexts beyond the measured one add."""
        per_sequence, per_token = self._per_context
        return max(context - MEASURED_CONTEXT, 0) * (sequences * per_sequence + tokens * per_token)


def measure(step: Callable[[int], float], largest: int, limit: float) -> StepTimeCurve:
    """The curve of `step(n)`, which runs n tokens and returns the seconds that it took.

    Sizes are timed in turn, round after round, and the fastest run of each counts, so that a burst of other load does
    not distort the curve. Each is run twice in a row and the second run is timed: a step after one of another size may
    take longer, which does not show where a step is long. A size that took longer than a larger one was slowed down, as
    by weights that its first run lays out, and is timed again.

    Args:
        largest: the largest size of interest.
        limit: seconds after which no further round begins; the first is always run whole.
    """
    sizes = [n for n in KNOTS if n < largest] + [largest]
    seconds = dict.fromkeys(sizes, float("inf"))
    step(largest)  # the first run of all pays for allocations
    deadline = time.perf_counter() + limit
    for _ in range(_ROUNDS):
        for size in sizes:
            taken = step(size)
            if taken < _LONG_STEP:
                taken = step(size)
            seconds[size] = min(seconds[size], taken)
        if time.perf_counter() > deadline:
            break
    for size, larger in reversed([*pairwise(sizes)]):
        for _ in range(_RETRIES):
            if seconds[size] > seconds[larger]:
                seconds[size] = min(seconds[size], step(size))
    return StepTimeCurve(seconds)


class LatestStepTime:
    """`StepTimes` of an engine whose steps take as long with drafts as without: as long as the latest one."""

    per_draft = per_change = per_branch = 0.0

    def __init__(self) -> None:
        self._seconds = 0.0

    def between(self, fewest: int, most: int, sequences: int, context: int = MEASURED_CONTEXT) -> Seconds:
        return np.full(most - fewest + 1, self._seconds)

    def observe(self, size: StepSize, seconds: float) -> None:
        self._seconds = seconds

    def known(self, sequences: int) -> bool:
        return self._seconds > 0.0

    def probes(self, sequences: int) -> bool:
        return False
