"""The statistics of experiments: against published implementations, and by simulated experiments.

Many runs are simulated at once, each read at equal distances while it grows. The noise is that of the bundled model:
with 140 questions, 4 clients and the hybrid strategy, the decode time per token had a coefficient of variation of 0.48
over requests, TTFT one of 0.41, the length 0.16.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from draftwood_service.experiments.statistics import (
    MIN_UNITS,
    Change,
    compare,
    is_rejected,
    log_evidence,
    quantile_change,
    quantile_sequence,
    sequence_radius,
    value_of,
)
from draftwood_tenants.experiments.assignment import BUCKETS
from draftwood_tenants.experiments.counts import (
    BINS,
    EDGES,
    FIELDS,
    TIME_PER_TOKEN,
    TOKENS_PER_STEP,
    TTFT,
    FloatArray,
    Metric,
    bin_of,
    column,
)

REQUESTS, LOOKS = 2000, 20
TPOT_SECONDS, TPOT_VARIATION = 0.0029, 0.5
TTFT_SECONDS, TTFT_VARIATION = 0.017, 0.41
TOKENS, TOKENS_VARIATION = 90.0, 0.16
PROMPT_EFFECT = 0.2
"""Standard deviation of log TTFT that comes from the length of prompts."""
SESSION_SHARE = 0.5
"""Share of the variance of log TPOT that the requests of a session have in common."""
_AT_ONCE = 40
"""Runs that are simulated at once; affects memory only."""


class Looks(NamedTuple):
    """What is known of the runs at each look.

    Attributes:
        sums: float64[run, look, arm, bucket, field].
        ttft: float64[run, look, arm, BINS], of the first request of each session.
    """

    sums: FloatArray
    ttft: FloatArray


def simulated(runs: int, random: np.random.Generator, session_length: float, speedup: float) -> Looks:
    """Runs of two arms.

    Args:
        session_length: mean requests of a session; 1.0 if the request is the unit.
        speedup: tokens per second of the treatment over those of the control.
    """
    shape = (runs, REQUESTS)
    first = random.random(shape) < 1.0 / session_length
    first[:, 0] = True
    session = np.cumsum(first, axis=1) - 1

    def per_session(values: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.take_along_axis(values, session, axis=1)

    arm = per_session(random.integers(2, size=shape)).astype(np.int64)
    bucket = per_session(random.integers(BUCKETS, size=shape)).astype(np.int64)
    common = per_session(random.standard_normal(shape)).astype(np.float64)
    noise = SESSION_SHARE**0.5 * common + (1 - SESSION_SHARE) ** 0.5 * random.standard_normal(shape)
    prompt = random.standard_normal(shape)
    tokens = np.maximum(np.rint(lognormal(TOKENS, TOKENS_VARIATION, random.standard_normal(shape))), 1.0)
    ttft = lognormal(TTFT_SECONDS, TTFT_VARIATION, random.standard_normal(shape)) * np.exp(PROMPT_EFFECT * prompt)
    tpot = lognormal(TPOT_SECONDS, TPOT_VARIATION, noise) / np.where(arm == 1, speedup, 1.0)
    ones, units = np.ones(shape), first.astype(np.float64)
    counted = {"requests": ones, "answered": ones, "units": units, "timed": ones}
    counted |= {"tokens": tokens, "decode_seconds": tpot * tokens, "ttft_seconds": ttft}
    look = np.broadcast_to(np.arange(REQUESTS) * LOOKS // REQUESTS, shape)
    group = (np.arange(runs)[:, None] * LOOKS + look) * 2 + arm
    sums = np.zeros((runs, LOOKS, 2, BUCKETS, len(FIELDS)))
    for name, values in counted.items():
        sums[..., column(name)] = binned(group * BUCKETS + bucket, values, sums.shape[:-1])
    bins = np.searchsorted(EDGES, ttft, side="left")
    histogram = binned(group * BINS + bins, units, (runs, LOOKS, 2, BINS))
    return Looks(np.cumsum(sums, axis=1), np.cumsum(histogram, axis=1))


def lognormal(mean: float, variation: float, normal: FloatArray) -> FloatArray:
    """Values with this mean and coefficient of variation, from standard normal ones."""
    spread = np.log1p(variation**2)
    values: FloatArray = mean * np.exp(np.sqrt(spread) * normal - spread / 2)
    return values


def binned(cells: NDArray[np.int64], values: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Sums of the values of each cell of an array of this shape."""
    sums: FloatArray = np.bincount(cells.ravel(), values.ravel(), minlength=math.prod(shape)).astype(np.float64)
    return sums.reshape(shape)


def fixed_bounds(change: Change, alpha: float) -> tuple[FloatArray, FloatArray]:
    """Bounds float64[...] for a single look at a size that was set in advance."""
    radius = NormalDist().inv_cdf(1.0 - alpha / 2) * np.sqrt(change.variance)
    return change.log_ratio - radius, change.log_ratio + radius


ALPHA = 0.05

Alarm = Callable[[Looks], NDArray[np.bool]]
"""Whether a look finds a difference: bool[run, look]."""


def change(looks: Looks, metric: Metric) -> Change:
    return compare(looks.sums[:, :, 0], looks.sums[:, :, 1], metric)


def excludes_zero(bounds: tuple[FloatArray, FloatArray]) -> NDArray[np.bool]:
    low, high = bounds
    return (low > 0) | (high < 0)


def mismatch(looks: Looks) -> NDArray[np.bool]:
    """A sample-ratio mismatch, "SRM"."""
    return is_rejected(looks.sums[..., column("units")].sum(-1), np.array([0.5, 0.5]), ALPHA)


FALSE_ALARMS: dict[str, Alarm] = {
    "mean TTFT": lambda looks: excludes_zero(change(looks, TTFT).sequence(ALPHA)),
    "decode time per token": lambda looks: excludes_zero(change(looks, TIME_PER_TOKEN).sequence(ALPHA)),
    "p90 of TTFT": lambda looks: excludes_zero(quantile_change(looks.ttft[:, :, 0], looks.ttft[:, :, 1], 0.9, ALPHA)),
    "SRM": mismatch,
}
POWER: dict[str, Alarm] = {
    "faster": lambda looks: change(looks, TIME_PER_TOKEN).sequence(ALPHA)[1] < 0,
    "SRM": mismatch,
}
NAIVE: dict[str, Alarm] = {"naive": lambda looks: excludes_zero(fixed_bounds(change(looks, TIME_PER_TOKEN), ALPHA))}


def shares(
    runs: int, seed: int, alarms: dict[str, Alarm], session_length: float = 1.0, speedup: float = 1.0
) -> dict[str, float]:
    """For each alarm the share of the runs in which any look raised it."""
    random, count = np.random.default_rng(seed), dict.fromkeys(alarms, 0)
    for begin in range(0, runs, _AT_ONCE):
        looks = simulated(min(_AT_ONCE, runs - begin), random, session_length, speedup)
        for name, alarm in alarms.items():
            count[name] += int(alarm(looks).any(axis=1).sum())
    return {name: raised / runs for name, raised in count.items()}


@pytest.mark.system
def test_few_equal_arms_raise_a_false_alarm_and_intervals_for_one_look_many() -> None:
    """20 of 200 are more than a share of 5% gives with a probability of 0.3%. That an interval for one look fails, when
    it is looked at 20 times, makes the bar worth testing."""
    found = shares(200, 3, FALSE_ALARMS | NAIVE, session_length=2.0)
    assert found.pop("naive") > 0.12
    assert max(found.values()) < 0.1


@pytest.mark.system
def test_ten_percent_more_tokens_per_second_is_found() -> None:
    """140 of 200 is less than a share of 80% gives with a probability of 0.1%."""
    found = shares(200, 4, POWER, speedup=1.1)
    assert found["faster"] > 0.7
    assert found["SRM"] < 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bars_hold_in_2000_experiments() -> None:
    """The shares are those of docs/experiments.md, which `pytest -rP` prints."""
    alarms, found = shares(2000, 0, FALSE_ALARMS, session_length=2.0), shares(2000, 1, POWER, speedup=1.1)
    print(alarms, found)
    assert max(*alarms.values(), found["SRM"]) <= ALPHA
    assert found["faster"] >= 0.8


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
    (TIME_PER_TOKEN, (0.067554516027, 0.015319400336, 0.122476970609)),
    (TTFT, (0.120043798886, 0.045805719744, 0.199551778823)),
]
"""Metric, and the relative change with its 95% interval by tea-tasting 1.14.0 for `arms`."""


@pytest.mark.parametrize(("metric", "expected"), TEA_TASTING)
def test_fixed_intervals_are_those_of_tea_tasting(
    arms: Arms, metric: Metric, expected: tuple[float, float, float]
) -> None:
    change = compare(*arms, metric)
    found = [float(np.expm1(one)) for one in (change.log_ratio, *fixed_bounds(change, 0.05))]
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.system
@pytest.mark.parametrize(("metric", "expected"), TEA_TASTING)
def test_the_figures_of_tea_tasting_are_its_own(
    arms: Arms, metric: Metric, expected: tuple[float, float, float]
) -> None:
    tea: Any = pytest.importorskip("tea_tasting", reason="`make test-system` installs it")
    arrow: Any = importlib.import_module("pyarrow")
    rows = np.concatenate(arms)
    table = {name: rows[:, column(name)] for name in (metric.numerator, metric.denominator)}
    table["variant"] = np.repeat([0, 1], [len(arms[0]), len(arms[1])])
    ratio = tea.RatioOfMeans(metric.numerator, metric.denominator, use_t=False, equal_var=False)
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
