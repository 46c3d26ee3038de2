"""Several strategies over the same recorded answers: acceptance compared without noise from assignment.

Every arm writes the same tokens, so arms differ in the number of steps alone. The differences are paired by answer, and
their interval comes from resampling answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood_benchmarks.replay.replay import replay
from draftwood_benchmarks.replay.trace import Recording
from draftwood_strategies import Strategy, create

RESAMPLES = 4000
_AT_ONCE = 200
"""Resamples that are drawn at once; affects memory only."""


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm: its name, its strategy, and the strategy's options."""

    name: str
    strategy: str
    options: Mapping[str, object]

    def create(self) -> Strategy:
        """Raises UnknownStrategyError, TypeError or ValueError as `strategies.create` does."""
        return create(self.strategy, **self.options)


@dataclass(frozen=True, slots=True)
class PairedRow:
    """An arm's acceptance, and its change from the first arm's with a 95% interval; None for the first arm.

    Attributes:
        answers: answers with at least one step.
        change, low, high: relative change of the acceptance length, 0.1 being 10% more tokens per step.
    """

    arm: str
    strategy: str
    answers: int
    tokens: int
    steps: int
    acceptance_length: float
    change: float | None = None
    low: float | None = None
    high: float | None = None


def steps_of(spec: ArmSpec, recordings: Sequence[Recording], budget: int) -> NDArray[np.int64]:
    """int64[answer]: steps of each answer, in order; the memory starts empty and learns from each."""
    strategy = spec.create()
    return np.array([replay(strategy, [recording], budget).steps for recording in recordings], np.int64)


def paired(specs: Sequence[ArmSpec], steps: Sequence[NDArray[np.int64]], tokens: NDArray[np.int64]) -> list[PairedRow]:
    """The rows of the arms.

    Args:
        specs: the arms, the first one being the control.
        steps: int64[answer] of each arm.
        tokens: int64[answer], tokens written in steps, which are the same in every arm.
    """
    rows: list[PairedRow] = []
    for spec, own in zip(specs, steps, strict=True):
        total = int(own.sum())
        bounds: tuple[float | None, float | None, float | None] = (None, None, None)
        if rows:
            bounds = (float(steps[0].sum() / total - 1.0), *interval(steps[0], own))
        length = float(tokens.sum() / total)
        answers = int((tokens > 0).sum())
        rows.append(PairedRow(spec.name, spec.strategy, answers, int(tokens.sum()), total, length, *bounds))
    return rows


def interval(control: NDArray[np.int64], treatment: NDArray[np.int64], seed: int = 0) -> tuple[float, float]:
    """95% percentile-bootstrap interval of the relative change of the acceptance length.

    Args:
        control, treatment: steps of the same answers, int64[answer]; those without a step say nothing.
        seed: of the resampling.
    """
    random = np.random.default_rng(seed)
    both = np.stack([control, treatment], axis=1)
    both = both[both[:, 0] > 0]
    changes = []
    for _ in range(RESAMPLES // _AT_ONCE):
        times_drawn = random.multinomial(len(both), np.full(len(both), 1.0 / len(both)), size=_AT_ONCE)
        sums = times_drawn @ both
        changes.append(sums[:, 0] / sums[:, 1] - 1.0)
    low, high = np.percentile(np.concatenate(changes), [2.5, 97.5])
    return float(low), float(high)
