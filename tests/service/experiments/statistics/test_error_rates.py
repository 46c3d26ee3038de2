"""Error rates of A/B tests that are looked at 20 times, by simulation: false alarms, and changes that are found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from draftwood_service.experiments.statistics.mixture import is_rejected, quantile_change
from draftwood_service.experiments.statistics.ratios import compare
from draftwood_tenants.experiments.outcomes import TIME_PER_TOKEN, TTFT, FloatArray, Metric, column
from tests.service.experiments.statistics.simulation import Looks, World, fixed_bounds, simulate

ALPHA = 0.05
LEAST_POWER = 0.8
SPEEDUP = 1.1
SESSION_LENGTH = 2.0
AA, AB = World(session_length=SESSION_LENGTH), World(speedup=SPEEDUP)

Alarm = Callable[[Looks], NDArray[np.bool]]
"""Whether a look finds a difference: bool[run, look]."""


def false_alarms(world: World, runs: int, seed: int) -> dict[str, float]:
    """Shares of the runs in which a look found a difference, or a sample-ratio mismatch ("SRM"); the arms are equal."""
    alarms: dict[str, Alarm] = {
        "mean TTFT": lambda looks: excludes_zero(looks, TTFT),
        "decode time per token": lambda looks: excludes_zero(looks, TIME_PER_TOKEN),
        "p90 of TTFT": _quantile_differs,
        "SRM": _mismatch,
    }
    return found_in(world, runs, seed, alarms)


def power(world: World, runs: int, seed: int) -> dict[str, float]:
    """Shares of the runs in which a look found that the treatment is "faster", which it is, or a mismatch ("SRM")."""
    return found_in(world, runs, seed, {"faster": _is_faster, "SRM": _mismatch})


def found_in(world: World, runs: int, seed: int, alarms: dict[str, Alarm]) -> dict[str, float]:
    """For each alarm the share of the runs in which any look raised it."""
    count = dict.fromkeys(alarms, 0)
    for looks in simulate(world, runs, seed):
        for name, alarm in alarms.items():
            count[name] += int(alarm(looks).any(axis=1).sum())
    return {name: raised / runs for name, raised in count.items()}


def excludes_zero(looks: Looks, metric: Metric) -> NDArray[np.bool]:
    """bool[run, look]: whether the confidence sequence of the change excludes 0."""
    low, high = compare(*_arms(looks.sums), metric).sequence(ALPHA)
    return (low > 0) | (high < 0)


def _is_faster(looks: Looks) -> NDArray[np.bool]:
    return compare(*_arms(looks.sums), TIME_PER_TOKEN).sequence(ALPHA)[1] < 0


def _quantile_differs(looks: Looks) -> NDArray[np.bool]:
    low, high = quantile_change(looks.ttft[:, :, 0], looks.ttft[:, :, 1], 0.9, ALPHA)
    return (low > 0) | (high < 0)


def _mismatch(looks: Looks) -> NDArray[np.bool]:
    return is_rejected(looks.sums[..., column("units")].sum(-1), np.array([0.5, 0.5]), ALPHA)


def _arms(sums: FloatArray) -> tuple[FloatArray, FloatArray]:
    return sums[:, :, 0], sums[:, :, 1]


RUNS, MANY_RUNS = 200, 2000


def test_few_equal_arms_raise_a_false_alarm() -> None:
    """20 of 200 are more than a share of 5% gives with a probability of 0.3%."""
    for share in false_alarms(AA, RUNS, seed=3).values():
        assert share * RUNS < 20


def test_ten_percent_more_tokens_per_second_is_found() -> None:
    """140 of 200 is less than a share of 80% gives with a probability of 0.1%."""
    found = power(AB, RUNS, seed=4)
    assert found["faster"] * RUNS > 140
    assert found["SRM"] * RUNS < 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bars_hold_in_2000_experiments() -> None:
    """The shares are those of docs/experiments.md, which `pytest -rP` prints."""
    alarms, found = false_alarms(AA, MANY_RUNS, seed=0), power(AB, MANY_RUNS, seed=1)
    print(alarms, found)
    assert max(*alarms.values(), found["SRM"]) <= ALPHA
    assert found["faster"] >= LEAST_POWER


def test_fixed_intervals_raise_many_false_alarms_in_the_same_simulation() -> None:
    """What makes the bar of 5% worth testing: an interval for one look fails it when it is looked at 20 times."""

    def naive(looks: Looks) -> np.ndarray:
        low, high = fixed_bounds(compare(*_arms(looks.sums), TIME_PER_TOKEN), ALPHA)
        return (low > 0) | (high < 0)

    def sequence(looks: Looks) -> np.ndarray:
        return excludes_zero(looks, TIME_PER_TOKEN)

    found = found_in(AA, RUNS, 3, {"naive": naive, "sequence": sequence})
    assert found["naive"] > 0.12
    assert found["sequence"] < 0.1
