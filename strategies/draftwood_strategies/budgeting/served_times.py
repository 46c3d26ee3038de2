"""What a step costs, learned from the steps of an engine that serves: there is no time to measure before it does.

It begins with a shape of the curve: wide steps are cheap. Drafting then shows what they cost, which a guess the other
way would never find out. What a step without drafts costs shows in such steps only, so one is made where that is
unknown.
"""

from __future__ import annotations

import math

import numpy as np

from draftwood_strategies.budgeting.step_time import KNOTS, Seconds, StepTimeCurve, StepTimes

_COST_OF_TOKEN = 0.02
"""Of a further token at first, as a share of a step of one token. It is about that on GPUs; on two cores it is 0.3
(`draftwood bench step`), which some steps teach. Not tuned."""
_SOME = 4
"""The fastest of so many steps of a size is what it costs at first: one may compile, or meet another process."""
_KNOWN_FOR = 512
"""Steps after which a size that none of them had is unknown again. A step without drafts in so many costs 0.2% where
each writes two tokens. Not tuned."""
_BETWEEN_PROBES = 4
"""Steps from one that is made without drafts to the next one, at least. Not tuned."""


class ServedStepTimes:
    """The step-time model of an engine whose steps are only watched. Steps are counted by their tokens."""

    def __init__(self) -> None:
        self._fastest: dict[int, float] = {}
        self._counts = dict.fromkeys(KNOTS, 0)
        self._seen_at = dict.fromkeys(KNOTS, -math.inf)
        self._steps = self._probed_at = 0
        self._times = self._model()

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        size = _nearest(tokens)
        self._steps += 1
        self._seen_at[size] = self._steps
        self._counts[size] += 1
        if self._counts[size] > _SOME:
            self._times.observe(tokens, 1, seconds)
            return
        of_size = seconds * _shape(size) / _shape(tokens)
        known = {one: self._times.at(one, 1) for one in self._fastest}
        self._fastest[size] = min(of_size, self._fastest.get(size, math.inf))
        self._times = self._model({**known, size: self._fastest[size]})

    def between(self, fewest: int, most: int) -> Seconds:
        """Seconds for `fewest` tokens, one more, and so on to `most`."""
        return self._times.between(fewest, most, 1)

    def at(self, tokens: int) -> float:
        """Seconds for one number of tokens."""
        return self._times.at(tokens, 1)

    @property
    def known(self) -> bool:
        """Whether a step was observed; before, only ratios mean something."""
        return self._steps > 0

    def probes(self, tokens: int) -> bool:
        """Whether the next step, of so many tokens without drafts, is to have none, to show what that takes."""
        if self._steps - self._seen_at[_nearest(tokens)] <= _KNOWN_FOR or not self._steps:
            return False
        if self._steps - self._probed_at < _BETWEEN_PROBES:
            return False
        self._probed_at = self._steps
        return True

    def _model(self, known: dict[int, float] | None = None) -> StepTimes:
        """Through sizes whose seconds are known, straight between them, and of the first shape beside them."""
        sizes = sorted(known := known or {1: 1.0})
        seconds = {}
        for size in KNOTS:
            inside = min(max(size, sizes[0]), sizes[-1])
            at = float(np.interp(inside, sizes, [known[one] for one in sizes]))
            seconds[size] = at * _shape(size) / _shape(inside)
        return StepTimes(StepTimeCurve(seconds))


def _nearest(tokens: int) -> int:
    return min(KNOTS, key=lambda size: abs(size - tokens))


def _shape(tokens: int) -> float:
    return 1.0 + _COST_OF_TOKEN * (tokens - 1)
