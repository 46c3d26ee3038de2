"""Error rates of A/B tests that are looked at 20 times, by simulation: false alarms, and changes that are found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from draftwood_service.experiments.statistics.mixture import is_rejected, quantile_change
from draftwood_service.experiments.statistics.ratios import Change, compare
from draftwood_tenants.experiments.outcomes import TIME_PER_TOKEN, TTFT, FloatArray, Metric, column
from tests.service.experiments.statistics.simulation import Looks, World, fixed_bounds, simulate

ALPHA = 0.05
MIN_POWER = 0.8
AA, AB = World(session_length=2.0), World(speedup=1.1)
RUNS, MANY_RUNS = 200, 2000

Alarm = Callable[[Looks], NDArray[np.bool]]
"""Whether a look finds a difference: bool[run, look]."""


def change(looks: Looks, metric: Metric) -> Change:
    return compare(looks.sums[:, :, 0], looks.sums[:, :, 1], metric)


def excludes_zero(bounds: tuple[FloatArray, FloatArray]) -> NDArray[np.bool]:
    low, high = bounds
    return (low > 0) | (high < 0)


def mismatch(looks: Looks) -> NDArray[np.bool]:
    return is_rejected(looks.sums[..., column("units")].sum(-1), np.array([0.5, 0.5]), ALPHA)


FALSE_ALARMS: dict[str, Alarm] = {
    "mean TTFT": lambda looks: excludes_zero(change(looks, TTFT).sequence(ALPHA)),
    "decode time per token": lambda looks: excludes_zero(change(looks, TIME_PER_TOKEN).sequence(ALPHA)),
    "p90 of TTFT": lambda looks: excludes_zero(quantile_change(looks.ttft[:, :, 0], looks.ttft[:, :, 1], 0.9, ALPHA)),
    "SRM": mismatch,
}
"""Where the arms are equal; "SRM" is a sample-ratio mismatch."""
POWER: dict[str, Alarm] = {
    "faster": lambda looks: change(looks, TIME_PER_TOKEN).sequence(ALPHA)[1] < 0,
    "SRM": mismatch,
}
"""Where the treatment is faster."""
NAIVE: dict[str, Alarm] = {"naive": lambda looks: excludes_zero(fixed_bounds(change(looks, TIME_PER_TOKEN), ALPHA))}


def shares(world: World, runs: int, seed: int, alarms: dict[str, Alarm]) -> dict[str, float]:
    """For each alarm the share of the runs in which any look raised it."""
    count = dict.fromkeys(alarms, 0)
    for looks in simulate(world, runs, seed):
        for name, alarm in alarms.items():
            count[name] += int(alarm(looks).any(axis=1).sum())
    return {name: raised / runs for name, raised in count.items()}


def test_few_equal_arms_raise_a_false_alarm_and_intervals_for_one_look_many() -> None:
    """20 of 200 are more than a share of 5% gives with a probability of 0.3%. That an interval for one look fails, when
    it is looked at 20 times, makes the bar worth testing."""
    found = shares(AA, RUNS, 3, FALSE_ALARMS | NAIVE)
    assert found.pop("naive") > 0.12
    assert max(found.values()) * RUNS < 20


def test_ten_percent_more_tokens_per_second_is_found() -> None:
    """140 of 200 is less than a share of 80% gives with a probability of 0.1%."""
    found = shares(AB, RUNS, 4, POWER)
    assert found["faster"] * RUNS > 140
    assert found["SRM"] * RUNS < 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bars_hold_in_2000_experiments() -> None:
    """The shares are those of docs/experiments.md, which `pytest -rP` prints."""
    alarms, found = shares(AA, MANY_RUNS, 0, FALSE_ALARMS), shares(AB, MANY_RUNS, 1, POWER)
    print(alarms, found)
    assert max(*alarms.values(), found["SRM"]) <= ALPHA
    assert found["faster"] >= MIN_POWER
