"""Sequential tests of counts, against published implementations and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftwood_service.experiments.statistics.mixture import log_evidence, quantile_change, quantile_sequence
from draftwood_tenants.experiments.latencies import BINS, EDGES, bin_of

CONFSEQ = [
    ((880, 1000), 0.8074775967),
    ((900, 1000), -0.5137776714),
    ((950, 1000), 9.5890320890),
    ((4400, 5000), 8.2825038794),
    ((0, 5), 0.1564247454),
    ((40, 40), 0.1477304792),
]
"""(values below the quantile, all values) and `beta_binomial_log_mixture` of confseq 0.0.11, uniform_boundaries.h, with
g=0.9, h=0.1, v_opt=400, alpha_opt=0.05, two-sided."""


@pytest.mark.parametrize(("counted", "expected"), CONFSEQ)
def test_two_categories_are_the_beta_binomial_mixture_of_confseq(counted: tuple[int, int], expected: float) -> None:
    below, size = counted
    rho, variance = 50.402243917025, 0.9 * 0.1  # its tuning for v_opt
    found = log_evidence(np.array([below, size - below], float), np.array([0.9, 0.1]), (rho - variance) / variance)
    assert found == pytest.approx(expected, abs=1e-8)


def histogram_of(values: np.ndarray) -> np.ndarray:
    return np.bincount([bin_of(value) for value in values], minlength=BINS).astype(float)


@pytest.mark.system
def test_quantile_bounds_hold_at_all_looks_and_become_narrow() -> None:
    random = np.random.default_rng(2)
    true = 0.02 * math.exp(0.4 * 1.2815515655)  # p90 of the log-normal below
    missed = 0
    for _ in range(100):
        values = 0.02 * np.exp(0.4 * random.standard_normal(2000))
        looks = np.cumsum([histogram_of(part) for part in np.split(values, 20)], axis=0)
        low, high = quantile_sequence(looks, 0.9, 0.05)
        missed += bool(((low > true) | (high < true)).any())
        assert 0.85 < low[-1] / true < high[-1] / true < 1.2
        assert np.isinf(high[0]) or high[0] >= high[-1]
    assert missed <= 12  # P(Binomial(100, 0.05) > 12) is below 0.002


def test_ties_do_not_exclude_the_value_that_all_have() -> None:
    histogram = np.zeros(BINS)
    histogram[50] = 10_000
    low, high = quantile_sequence(histogram, 0.5, 0.05)
    assert low == EDGES[49]
    assert high == EDGES[50]
    assert [float(one) for one in quantile_sequence(np.zeros(BINS), 0.5, 0.05)] == [0.0, math.inf]


def test_a_slower_arm_has_a_larger_quantile() -> None:
    random = np.random.default_rng(3)
    normal = np.exp(0.4 * random.standard_normal((2, 4000)))
    control, slower = histogram_of(0.02 * normal[0]), histogram_of(0.03 * normal[1])
    low, high = quantile_change(control, slower, 0.9, 0.05)
    assert 0 < low < math.log(1.5) < high
    low, high = quantile_change(control, np.zeros(BINS), 0.9, 0.05)
    assert [float(low), float(high)] == [-math.inf, math.inf]
