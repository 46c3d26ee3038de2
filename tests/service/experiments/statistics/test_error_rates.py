"""Error rates of A/B tests that are looked at 20 times, by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_service.experiments.statistics.ratios import compare
from draftwood_tenants.experiments.outcomes import TIME_PER_TOKEN
from tests.service.experiments.statistics.error_rates import (
    AA,
    AB,
    ALPHA,
    LEAST_POWER,
    excludes_zero,
    false_alarms,
    found_in,
    power,
)
from tests.service.experiments.statistics.simulation import Looks

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
        low, high = compare(looks.sums[:, :, 0], looks.sums[:, :, 1], TIME_PER_TOKEN).fixed(0.05)
        return (low > 0) | (high < 0)

    def sequence(looks: Looks) -> np.ndarray:
        return excludes_zero(looks, TIME_PER_TOKEN)

    found = found_in(AA, RUNS, 3, {"naive": naive, "sequence": sequence})
    assert found["naive"] > 0.12
    assert found["sequence"] < 0.1
