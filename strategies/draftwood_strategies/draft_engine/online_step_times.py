"""What a step costs, learned from the steps of an engine that serves: there is no time to measure before it does.

It starts with an assumed curve on which wide steps are cheap, so that drafts are tried and their steps show the cost.
If wide steps were assumed expensive, nothing would be drafted, and the cost would never be learned. The cost of a step
without drafts shows in such steps only, so one is made if that is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from draftwood_strategies.draft_engine.step_times import (
    KNOTS,
    MEASURED_CONTEXT,
    SMOOTHING_EVERYWHERE,
    Seconds,
    StepSize,
    StepTimeCurve,
)

_COST_OF_TOKEN = 0.02
"""Of a further token at first, as a share of a step of one token. It is about that on GPUs; on two cores it is 0.05 in
vLLM and 0.3 in our engine (`draftwood bench step`), which some steps show."""
_FIRST_STEPS = 4
"""The fastest of so many steps of a size is what it costs at first: one may compile, or meet another process."""
_MAX_RELATIVE_ERROR = 0.25
"""Of a step, at most, as a share of what was expected: a longer one met another process."""
_AVERAGED_STEPS = 200
"""Steps of a size that its cost relative to others is the mean of; what all steps have in common is followed faster. A
draft is worth the difference of two sizes, which is a small part of either."""
_STALE_AFTER = 8, 512
"""Steps after which a size that none of them had is unknown again: at first, and at most, doubling with each step that
is made for it. A step without drafts in 512 costs 0.2% where each writes two tokens."""
_MIN_STEPS_BETWEEN_PROBES = 4
"""Steps from one that is made without drafts to the next one, at least."""
_WARM_UP_STEPS, _OUTLIER_FACTOR = 3, 2.0
"""So many first steps of a size are not believed if they take so many times what is expected: kernels that run for the
first time allocate, compile, or wait for other ranks to do so."""
_FORGET_AFTER = 256, 4096
"""Steps without a draft of some size after which what it cost is forgotten: at first, and at most, doubling each time.
A step shows it again. Other load may have made drafts look expensive, above all at the start."""


class OnlineStepTimes:
    """`StepTimes` of an engine whose steps are only watched, as nothing can be measured before it serves.

    There is a curve over tokens for each number of sequences, to a power of 2: a token costs more as a sequence's only
    one than as a draft, and in a common curve steps of many sequences would make the drafts of few look expensive.
    """

    per_draft = per_change = per_branch = 0.0

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}

    def observe(self, size: StepSize, seconds: float) -> None:
        self._of(size.sequences).observe(size.tokens, seconds)

    def between(self, fewest: int, most: int, sequences: int, context: int = MEASURED_CONTEXT) -> Seconds:
        return self._of(sequences).times.between(fewest, most)

    def known(self, sequences: int) -> bool:
        return self._of(sequences).steps > 0

    def probes(self, sequences: int) -> bool:
        return self._of(sequences).probes(sequences)

    def _of(self, sequences: int) -> _Curve:
        size = sequences.bit_length()
        if size not in self._curves:
            observed = [other for other, curve in self._curves.items() if curve.steps]
            nearest = min(observed, key=lambda other: abs(other - size), default=None)
            self._curves[size] = _Curve(_first_shape if nearest is None else self._curves[nearest].times.at)
        return self._curves[size]


class _Curve:
    """Seconds of a step by its tokens.

    Args:
        shape: seconds, in any unit, of a step of so many tokens, where none was observed.

    Attributes:
        steps: that were observed.
        times: the curve.
    """

    def __init__(self, shape: Callable[[int], float]) -> None:
        self.steps = 0
        self._shape = {size: shape(size) for size in KNOTS}
        self._fastest: dict[int, float] = {}
        self._counts = dict.fromkeys(KNOTS, 0)
        self._seen_at = dict.fromkeys(KNOTS, -math.inf)
        self._probed_at = self._probes = 0
        self._remembered = self._forget_at = _FORGET_AFTER[0]
        self.times = self._model({})

    def observe(self, tokens: int, seconds: float) -> None:
        size = _nearest(tokens)
        self.steps += 1
        self._seen_at[size] = self.steps
        self._counts[size] += 1
        if self.steps >= self._forget_at:
            self._forget()
        expected = self.times.at(tokens)
        if self._counts[size] <= _WARM_UP_STEPS and self.steps > 1 and seconds > _OUTLIER_FACTOR * expected:
            return  # believed, it would end drafts of this size for good
        if self._counts[size] > _FIRST_STEPS:
            error = min(max(seconds / expected - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
            share = 1.0 / min(self._counts[size], _AVERAGED_STEPS)
            self.times.correct(tokens, error, SMOOTHING_EVERYWHERE + share)
            return
        known = {measured: self.times.at(measured) for measured in self._fastest}
        of_size = seconds * self.times.at(size) / expected
        self._fastest[size] = min(of_size, self._fastest.get(size, math.inf))
        self.times = self._model({**known, size: self._fastest[size]})

    def probes(self, tokens: int) -> bool:
        """Whether a step of so many tokens is to be made."""
        first, most = _STALE_AFTER
        if self.steps - self._seen_at[_nearest(tokens)] <= min(first * 2**self._probes, most) or not self.steps:
            return False
        if self.steps - self._probed_at < _MIN_STEPS_BETWEEN_PROBES:
            return False
        self._probed_at = self.steps
        self._probes += 1
        return True

    def _forget(self) -> None:
        """Forgets sizes that no step had for long, but for that of steps without drafts (`probes`)."""
        long_ago = self.steps - self._remembered
        self._remembered = min(2 * self._remembered, _FORGET_AFTER[1])
        self._forget_at = self.steps + self._remembered
        stale = [size for size in sorted(self._fastest)[1:] if self._seen_at[size] <= long_ago]
        for size in stale:
            del self._fastest[size]
            self._counts[size] = _WARM_UP_STEPS  # the next step is believed
        if stale:
            self.times = self._model({size: self.times.at(size) for size in self._fastest})

    def _model(self, known: dict[int, float]) -> StepTimeCurve:
        """Through sizes whose seconds are known, straight between them, and of the first shape beside them."""
        if not known:
            return StepTimeCurve(self._shape).widened()
        sizes = sorted(known)
        seconds = {}
        for size in KNOTS:
            inside = min(max(size, sizes[0]), sizes[-1])
            at = float(np.interp(inside, sizes, [known[measured] for measured in sizes]))
            seconds[size] = at * self._shape[size] / float(np.interp(inside, KNOTS, [*self._shape.values()]))
        return StepTimeCurve(seconds).widened()


def _nearest(tokens: int) -> int:
    return min(KNOTS, key=lambda size: abs(size - tokens))


def _first_shape(tokens: int) -> float:
    return 1.0 + _COST_OF_TOKEN * (tokens - 1)
