"""Differences of ratios: against tea-tasting, confseq and simulation."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from draftwood_service.experiments.statistics.ratios import MIN_UNITS, compare, sequence_radius, value_of
from draftwood_tenants.experiments.outcomes import (
    COVARIATES,
    FIELDS,
    TIME_PER_TOKEN,
    TOKENS_PER_STEP,
    TTFT,
    Metric,
    column,
)
from tests.service.experiments.statistics.simulation import fixed_bounds

Arms = tuple[np.ndarray, np.ndarray]


def requests(random: np.random.Generator, units: int, slower: float = 1.0) -> np.ndarray:
    """A unit in each bucket: float64[units, field]."""
    sums = np.zeros((units, len(FIELDS)))
    prompt = random.standard_normal(units)
    tokens = random.integers(20, 200, units)
    values = {
        "requests": np.ones(units), "answered": np.ones(units), "units": np.ones(units), "timed": np.ones(units),
        "tokens": tokens,
        "decode_seconds": tokens * 0.003 * slower * np.exp(0.45 * random.standard_normal(units)),
        "ttft_seconds": 0.02 * slower * np.exp(0.3 * random.standard_normal(units) + 0.6 * prompt),
        "log_prompt_tokens": 4.0 + prompt,
    }  # fmt: skip
    for name, value in values.items():
        sums[:, column(name)] = value
    return sums


@pytest.fixture
def arms() -> Arms:
    random = np.random.default_rng(5)
    return requests(random, 900), requests(random, 900, slower=1.08)


@pytest.mark.parametrize(("v", "bound"), [(50.0, 25.8988141981), (400.0, 60.7041798075), (2500.0, 159.0231059710)])
def test_the_sequence_is_the_normal_mixture_bound_of_confseq(v: float, bound: float) -> None:
    """`normal_mixture_bound(v, 0.05, v_opt=400, 0.05, two-sided)` of confseq 0.0.11 bounds a sum of variance v."""
    rho = 50.402243917025  # its tuning for v_opt
    assert v * float(sequence_radius(np.array(1 / v), 0.05, rho**-0.5)) == pytest.approx(bound, abs=1e-7)


TEA_TASTING = [
    (TIME_PER_TOKEN, False, (0.067554516027, 0.015319400336, 0.122476970609)),
    (TIME_PER_TOKEN, True, (0.067287588554, 0.015064990037, 0.122196911392)),
    (TTFT, False, (0.120043798886, 0.045805719744, 0.199551778823)),
    (TTFT, True, (0.070067413966, 0.026892348642, 0.115057748697)),
]
"""Metric, with CUPED or not, and the relative change with its 95% interval by tea-tasting 1.14.0 for `arms`."""


@pytest.mark.parametrize(("metric", "adjust", "expected"), TEA_TASTING)
def test_fixed_intervals_are_those_of_tea_tasting(
    arms: Arms, metric: Metric, adjust: bool, expected: tuple[float, float, float]
) -> None:
    if not adjust:
        for arm in arms:
            arm[:, [column(name) for name in COVARIATES]] = 0
    change = compare(*arms, metric)
    found = [float(np.expm1(one)) for one in (change.log_ratio, *fixed_bounds(change, 0.05))]
    # With CUPED tea-tasting centres its one covariate in another way.
    assert found == pytest.approx(expected, abs=5e-4 if adjust else 1e-9)


@pytest.mark.system
@pytest.mark.parametrize(("metric", "adjust", "expected"), TEA_TASTING)
def test_the_figures_of_tea_tasting_are_its_own(
    arms: Arms, metric: Metric, adjust: bool, expected: tuple[float, float, float]
) -> None:
    tea: Any = pytest.importorskip("tea_tasting", reason="`make test-system` installs it")
    arrow: Any = importlib.import_module("pyarrow")
    rows = np.concatenate(arms)
    table = {name: rows[:, column(name)] for name in (metric.numerator, metric.denominator, "log_prompt_tokens")}
    table["variant"] = np.repeat([0, 1], [len(arms[0]), len(arms[1])])
    covariate = {"numer_covariate": "log_prompt_tokens"} if adjust else {}
    ratio = tea.RatioOfMeans(metric.numerator, metric.denominator, **covariate, use_t=False, equal_var=False)
    found = tea.Experiment(found=ratio).analyze(arrow.table(table))["found"]
    bounds = (found.rel_effect_size, found.rel_effect_size_ci_lower, found.rel_effect_size_ci_upper)
    assert bounds == pytest.approx(expected, abs=1e-9)


def test_there_are_no_bounds_with_few_units_or_without_a_value(arms: Arms) -> None:
    few = compare(arms[0][: MIN_UNITS - 1], arms[1][: MIN_UNITS - 1], TTFT)
    assert [float(bound) for bound in few.sequence(0.05)] == [-np.inf, np.inf]
    undefined = compare(*arms, TOKENS_PER_STEP)
    assert np.isnan(undefined.log_ratio)
    assert not np.isfinite(value_of(arms[0], TOKENS_PER_STEP))
    assert not (undefined.sequence(0.05)[0] > 0)


def test_an_arm_without_noise_is_compared_without_error(arms: Arms) -> None:
    """Drafting off writes exactly one token a step."""
    off, trie = arms[0].copy(), arms[0].copy()
    off[:, column("steps")] = off[:, column("tokens")]
    trie[:, column("steps")] = trie[:, column("tokens")] / 2
    change = compare(off, trie, TOKENS_PER_STEP)
    low, high = change.sequence(0.05)
    assert float(change.log_ratio) == pytest.approx(np.log(2.0))
    assert high - low < 1e-6
