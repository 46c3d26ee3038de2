"""What a step costs: measured at start, kept true by every step that is timed. No torch.

Tokens cost by a measured curve, on each number of CPU threads that a step may run on; every further sequence adds its
own attention calls. A small model's narrow step is faster on one thread, a wide one on all cores: where the curves
cross, and how far another process's load moves that, only measuring tells. So does what steps cost that are wider than
any that was measured at start: many sequences' drafts together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import reduce

import numpy as np
import numpy.typing as npt

KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ROUNDS = 8
_WIDEST = 8192
"""Tokens of a step up to which its cost is learned."""
_SMOOTHING, _SMOOTHING_EVERYWHERE = 0.05, 0.025
_TABLE = 256
"""Tokens of a step up to which its cost is looked up, and not computed: most are narrower."""
_LEAST_SHARE = 0.1
"""Of a surprise, what further sequences are blamed for at least; else what once seemed free would stay so."""
_TRIAL_WEIGHT = 4.0
"""A trial comes seldom, so it counts more."""
_TRIAL_EVERY, _TRIAL_STEPS = 128, 4
"""A trial is of a few steps in a row: the first pays for threads that slept and caches that hold nothing yet."""
_TRIAL_COST = 1.5
"""What is expected to take this much longer is not tried."""
_WORTH_MORE_THREADS = 1.08
"""More threads must save this much: they are taken from whatever else the machine does."""

Seconds = npt.NDArray[np.float64]


class StepTimeCurve:
    """Seconds that one forward pass takes over n tokens: linear between measured sizes.

    Two laws that noise must not break: more tokens never take less time, and never more time a token.

    Args:
        seconds: size -> measured seconds; at least one size.
    """

    def __init__(self, seconds: dict[int, float]) -> None:
        self.sizes = np.array(sorted(seconds), np.float64)
        measured = np.array([seconds[int(n)] for n in self.sizes], np.float64)
        per_token = np.minimum.accumulate(measured / self.sizes)
        self.seconds = np.maximum.accumulate(per_token * self.sizes)
        self._tabulate()

    def widened(self, widest: int = _WIDEST) -> StepTimeCurve:
        """The same curve with sizes up to `widest`, each twice the one before, to be corrected.

        There it goes on as steeply as it rises anywhere at the end: a step's cost does not flatten out.
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

    def correct(self, tokens: int, surprise: float) -> None:
        """Draws the curve towards a step that took 1 + `surprise` times what was expected: a little everywhere, and
        more where it was. Sizes that no step has follow where a law wants it."""
        nearest = int(np.argmin(np.abs(self.sizes - tokens)))
        here = self.seconds[nearest] * (1.0 + _SMOOTHING * surprise)
        ratios = self.sizes / self.sizes[nearest]
        everywhere = self.seconds * (1.0 + _SMOOTHING_EVERYWHERE * surprise)
        self.seconds = np.clip(everywhere, here * np.minimum(ratios, 1.0), here * np.maximum(ratios, 1.0))
        self._tabulate()

    def _tabulate(self) -> None:
        """It is read for every step."""
        self._table = np.interp(np.arange(min(self.sizes[-1], _TABLE) + 1), self.sizes, self.seconds)


class StepTimes:
    """What a step costs, and how many CPU threads it should run on.

    Args:
        curves: number of threads -> the curve of one sequence's step on them; at least one.
        per_sequence: number of threads -> seconds that every further sequence adds.
    """

    def __init__(self, curves: dict[int, StepTimeCurve], per_sequence: dict[int, float]) -> None:
        self._curves = {threads: curve.widened() for threads, curve in sorted(curves.items())}
        self._per_sequence = dict(per_sequence)
        self._settle()
        self._steps = 0
        self._tried = self._trial_left = 0

    def between(self, fewest: int, most: int, sequences: int) -> Seconds:
        """Seconds for `fewest` tokens, one more, and so on to `most`, over all of `sequences` sequences, on the best
        number of threads."""
        more = sequences - 1
        if more == 0 and most < self._alone.size:
            return self._alone[fewest : most + 1]
        curves = [curve.between(fewest, most) + more * self._per_sequence[n] for n, curve in self._curves.items()]
        return np.asarray(reduce(np.minimum, curves))

    def choose_threads(self, tokens: int, sequences: int, urgent: bool = False) -> int:
        """The number of threads for the next step: the fewest of those that are about as fast as any.

        Now and then another one for a few steps, lest it be judged for ever by one bad moment; an urgent step ends
        such a trial.
        """
        more, extra = sequences - 1, self._per_sequence
        costs = {threads: curve.at(tokens) + more * extra[threads] for threads, curve in self._curves.items()}
        least = min(costs.values())
        best = next(threads for threads, cost in costs.items() if cost <= _WORTH_MORE_THREADS * least)
        others = [threads for threads, cost in costs.items() if threads != best and cost < _TRIAL_COST * least]
        self._steps += 1
        self._trial_left = max(self._trial_left - 1, 0)
        if others and self._steps % _TRIAL_EVERY == 0:
            self._tried = others[self._steps // _TRIAL_EVERY % len(others)]
            self._trial_left = _TRIAL_STEPS
        if urgent or self._tried not in others:
            self._trial_left = 0
        return self._tried if self._trial_left else best

    def observe(self, tokens: int, sequences: int, threads: int, seconds: float) -> None:
        """Takes note of a step that `choose_threads` chose the threads of, unless a trial began with it."""
        if self._trial_left == _TRIAL_STEPS:
            return
        curve, extra = self._curves[threads], (sequences - 1) * self._per_sequence[threads]
        expected = curve.at(tokens) + extra
        # A step far from what was expected met another process, not another curve.
        surprise = min(max(seconds / expected, 0.5), 2.0) - 1.0
        if self._trial_left:
            surprise *= _TRIAL_WEIGHT
        curve.correct(tokens, surprise)
        if sequences > 1:
            blamed = max(extra, _LEAST_SHARE * expected)
            self._per_sequence[threads] = max(0.0, extra + _SMOOTHING * surprise * blamed) / (sequences - 1)
        self._settle()

    def _settle(self) -> None:
        """A table of what one sequence's step costs."""
        self._alone = reduce(np.minimum, [curve.between(0, _TABLE) for curve in self._curves.values()])


def measure(step: Callable[[int], float], largest: int, limit: float) -> StepTimeCurve:
    """The curve of `step(n)`, which runs n tokens and returns the seconds that it took.

    Sizes are timed in turn, round after round, and the fastest run of each counts, so that a burst of other load does
    not bend the curve.

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
            seconds[size] = min(seconds[size], step(size))
        if time.perf_counter() > deadline:
            break
    return StepTimeCurve(seconds)
