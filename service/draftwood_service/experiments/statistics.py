"""What the counts of an A/B test allow to conclude: shares, quantiles, ratios and guardrails, valid at every look.

Pure functions over numpy: nothing in here knows of gRPC, storage, the engine or the rest of the service.
`docs/experiments.md` has the assumptions.

Counts are tested by the Dirichlet mixture of multinomial likelihood ratios, exact at every sample size. Under the null
hypothesis the mixture is a non-negative martingale with mean 1, so it exceeds 1/alpha at any time with probability
alpha at most (Ville), however often one looks. The same test serves shares of units (sample-ratio mismatch: Lindon and
Malek 2022, arXiv 2011.03567), errors by arm (the same null hypothesis, among the units that erred), and, with two
categories, quantiles: the beta-binomial mixture of Howard and Ramdas (2022, arXiv 1906.09712).

Ratios of sums are compared by the logarithm of treatment over control, whose variance is that of the delta method over
buckets (Deng, Knoblich and Lu 2018). It is approximately normal with independent increments in information, which the
asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (2024, arXiv 2103.06476) bounds at all
times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood_tenants.experiments.assignment import Limits, Split
from draftwood_tenants.experiments.counts import EDGES, TTFT, Counts, FloatArray, Metric, column

CONCENTRATION = 100.0
"""Weight of the Dirichlet prior around the null hypothesis, in observations. It changes which deviation is found
soonest, and not the share of false alarms. A share of 0.55 instead of 0.5 is found at alpha 0.01 after 1,250, 1,140 and
1,560 units (median) with 10, 100 and 1,000; one of 0.6 after 240, 280 and 600."""

log_gamma = np.vectorize(math.lgamma, otypes=[np.float64])
"""log Gamma(x) of each x > 0."""
MIN_UNITS = 100
"""Units in each arm from which on the normal approximation is used; there are no bounds before."""
EFFECT = 0.05
"""Scale of the differences that are looked for, as logarithm: standard deviation of the normal mixture. The interval is
tightest when the standard error is about a third of it. It changes power only: 10% more tokens/s are found (as in
tests/service/experiments/test_statistics.py) in 66%, 83%, 89%, 90% and 86% of the runs with 0.02, 0.03,
0.05, 0.1 and 0.2."""
_UNITS, _TIMED = column("units"), column("timed")


def log_evidence(counts: FloatArray, probabilities: FloatArray, concentration: float = CONCENTRATION) -> FloatArray:
    """Logarithm of the mixture ratio against the hypothesis that categories have these probabilities.

    Args:
        counts: float64[..., category], whole numbers.
        probabilities: float64[category], positive, of sum 1.
        concentration: weight of the prior.

    Returns:
        float64[...]: above log(1/alpha) the hypothesis is rejected at level alpha.
    """
    prior = concentration * probabilities
    each = log_gamma(counts + prior) - log_gamma(prior) - counts * np.log(probabilities)
    whole = log_gamma(np.asarray(concentration)) - log_gamma(counts.sum(-1) + concentration)
    evidence: FloatArray = each.sum(-1) + whole
    return evidence


def is_rejected(counts: FloatArray, probabilities: FloatArray, alpha: float) -> NDArray[np.bool]:
    """bool[...]: whether the counts reject the probabilities at level alpha, at any time."""
    return log_evidence(counts, probabilities) > -math.log(alpha)


def quantile_sequence(histogram: FloatArray, probability: float, alpha: float) -> tuple[FloatArray, FloatArray]:
    """Confidence sequence of a quantile: bounds in seconds that hold at all times together with probability 1 - alpha.

    The quantile q has #{X <= q} at least Binomial(n, probability), #{X < q} at most that. So an edge is below q if too
    few values are at most the edge, and not below q if too many are; ties within a bin only widen the interval.

    Args:
        histogram: float64[..., BINS] of `latencies`.
        probability: of the quantile, between 0 and 1.

    Returns:
        Two float64[...]; 0 and inf where there is no bound.
    """
    below = np.cumsum(histogram, axis=-1)[..., :-1]
    size = histogram.sum(-1)[..., None]
    counts = np.stack([below, size - below], axis=-1)
    rejected = is_rejected(counts, np.array([probability, 1.0 - probability]), alpha)
    low = np.where(rejected & (below < probability * size), EDGES, 0.0).max(-1)
    high = np.where(rejected & (below > probability * size), EDGES, np.inf).min(-1)
    return low, high


def quantile_change(
    control: FloatArray, treatment: FloatArray, probability: float, alpha: float
) -> tuple[FloatArray, FloatArray]:
    """Bounds on the logarithm of the treatment's quantile over the control's; each arm's sequence gets half of alpha.

    Args:
        control, treatment: float64[..., BINS].

    Returns:
        Two float64[...], -inf and inf where there is no bound.
    """
    low_control, high_control = quantile_sequence(control, probability, alpha / 2)
    low_treatment, high_treatment = quantile_sequence(treatment, probability, alpha / 2)
    with np.errstate(divide="ignore"):
        logs = [np.log(bound) for bound in (low_treatment, high_control, high_treatment, low_control)]
    return logs[0] - logs[1], logs[2] - logs[3]


@dataclass(frozen=True, slots=True)
class Change:
    """A treatment's metric over the control's.

    Attributes:
        log_ratio: float64[...], logarithm of the ratio; nan where a metric is undefined.
        variance: float64[...] of `log_ratio`; inf where there are too few units to say.
    """

    log_ratio: FloatArray
    variance: FloatArray

    def sequence(self, alpha: float) -> tuple[FloatArray, FloatArray]:
        """Bounds float64[...] that hold at all looks together with probability 1 - alpha, asymptotically."""
        radius = sequence_radius(self.variance, alpha)
        return self.log_ratio - radius, self.log_ratio + radius


def sequence_radius(variance: FloatArray, alpha: float, effect: float = EFFECT) -> FloatArray:
    """Half the width of the normal-mixture confidence sequence of an estimate with this variance, float64[...].

    With drift drawn from N(0, effect^2) the mixture of likelihood ratios of an estimate d of variance v is
    sqrt(v / (v + effect^2)) exp(d^2 effect^2 / (2 v (v + effect^2))); the radius is the d at which it is 1/alpha.
    """
    usable = np.isfinite(variance) & (variance > 0)
    v = np.where(usable, variance, 1.0)
    widened = v + effect**2
    radius = np.sqrt(v * widened / effect**2 * (np.log(widened / v) - 2.0 * math.log(alpha)))
    return np.where(usable, radius, np.where(variance == 0, 0.0, np.inf))


def value_of(sums: FloatArray, metric: Metric) -> FloatArray:
    """The metric of an arm, float64[...], from sums float64[..., bucket, field]; nan or inf if its denominator is 0."""
    summed = sums.sum(-2)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: FloatArray = summed[..., column(metric.numerator)] / summed[..., column(metric.denominator)]
    return ratio


def compare(control: FloatArray, treatment: FloatArray, metric: Metric) -> Change:
    """The change of a metric from control to treatment.

    Args:
        control, treatment: sums of an arm, float64[..., bucket, field].
    """
    arms = np.stack([control, treatment], axis=-3)
    buckets = arms.shape[-2]
    numerator, denominator = arms[..., column(metric.numerator)], arms[..., column(metric.denominator)]
    size = denominator.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = numerator.sum(-1) / size
        residual = numerator - ratio[..., None] * denominator
        variance = buckets / (buckets - 1) * (residual**2).sum(-1) / (size * ratio) ** 2
        logs = np.log(ratio)
        change, both = logs[..., 1] - logs[..., 0], variance.sum(-1)
    counted = [_UNITS, _TIMED] if metric.denominator == "timed" else [_UNITS]
    units = arms[..., counted].sum(-2).min((-1, -2))
    known = np.isfinite(change) & np.isfinite(both)
    return Change(np.where(known, change, np.nan), np.where(known & (units >= MIN_UNITS), both, np.inf))


@dataclass(frozen=True, slots=True)
class Violation:
    """An arm beyond a limit; `guardrail` is "errors", "ttft" or "differing"."""

    arm: str
    guardrail: str
    reason: str


def violations(
    split: Split, counts: Counts, limits: Limits | None = None, stopped: frozenset[str] = frozenset()
) -> list[Violation]:
    """The arms to stop. The control can only differ: its errors and times are what the others are compared with.

    Args:
        stopped: arms that are stopped already.
    """
    limits = limits or Limits()
    violated = []
    for arm, name in enumerate(split.arms):
        if name in stopped:
            continue
        reasons = {
            "errors": _errors(split, counts, arm, limits.alpha) if arm else None,
            "ttft": _slower(counts, arm, limits) if arm else None,
            "differing": _differing(counts, arm, limits),
        }
        violated += [Violation(name, guardrail, reason) for guardrail, reason in reasons.items() if reason]
    return violated


def _errors(split: Split, counts: Counts, arm: int, alpha: float) -> str | None:
    """If an error does not depend on the arm, each unit that erred is in this arm with the probability of the split."""
    erred = counts.sums[[0, arm], :, column("erred_units")].sum(-1)
    shares = np.array([split.shares[0], split.shares[arm]])
    shares /= shares.sum()
    if erred[1] <= shares[1] * erred.sum() or not is_rejected(erred, shares, alpha):
        return None
    units = counts.sums[[0, arm], :, column("units")].sum(-1)
    return f"{erred[1]:.0f} of {units[1]:.0f} units had errors, {erred[0]:.0f} of {units[0]:.0f} in {split.arms[0]}"


def _slower(counts: Counts, arm: int, limits: Limits) -> str | None:
    low, _ = compare(counts.sums[0], counts.sums[arm], TTFT).sequence(limits.alpha)
    if not low > math.log1p(limits.slower_ttft):
        return None
    return f"the mean time to first token is at least {np.expm1(low):.0%} longer; {limits.slower_ttft:.0%} is allowed"


def _differing(counts: Counts, arm: int, limits: Limits) -> str | None:
    audited, differing = counts.sums[arm][:, [column("audited"), column("differing")]].sum(0)
    if differing <= limits.differing * audited:
        return None
    allowed = np.array([limits.differing, 1.0 - limits.differing])
    if not is_rejected(np.array([differing, audited - differing]), allowed, limits.alpha):
        return None
    return f"{differing:.0f} of {audited:.0f} audited answers differ; {limits.differing:.2%} is allowed"
