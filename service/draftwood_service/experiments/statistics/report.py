"""The report of an experiment: a table as data, and in plain words what may be concluded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from draftwood_service.experiments.statistics.guardrails import Violation, violations
from draftwood_service.experiments.statistics.mixture import is_rejected, quantile_change
from draftwood_service.experiments.statistics.ratios import LEAST_UNITS, compare, value_of
from draftwood_tenants.experiments.assignment import Split
from draftwood_tenants.experiments.counters import LATENCIES, Counts
from draftwood_tenants.experiments.latencies import quantile
from draftwood_tenants.experiments.limits import Limits
from draftwood_tenants.experiments.outcomes import METRICS, TIME_PER_TOKEN, FloatArray, column

QUANTILES = (0.5, 0.9)
KEYS = {metric.title: metric.key for metric in METRICS} | {
    f"{latency} p{100 * p:.0f}": f"{latency}_seconds_p{100 * p:.0f}" for latency in LATENCIES for p in QUANTILES
}
"""Of each metric's title, its key for programs; keys are a part of the protocol."""
SAMPLE_RATIO_ALPHA = 0.01
INTERFERENCE = (
    "Arms share steps: a step lasts equally long for all requests in it. So differences in time are smaller here than "
    "between services that each run one arm, and a difference that is found is a lower bound. Arms also share the "
    "draft budget of a step when it is full; `draftwood experiment replay` compares acceptance without that."
)


@dataclass(frozen=True, slots=True)
class ArmRow:
    """What was counted of an arm. Metrics by title, quantiles as "ttft p50" in seconds; None if there is no value."""

    arm: str
    units: int
    requests: int
    errors: int
    values: dict[str, float | None]
    audited: int = 0
    differing: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm against the control: relative change, -0.1 being 10% less, with bounds valid at every look.

    Attributes:
        change: the estimate; None if there is none.
        low, high: the bounds; None where there is no bound.
        verdict: "better", "worse" or "open".
    """

    arm: str
    metric: str
    change: float | None
    low: float | None
    high: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What may be concluded.

    Attributes:
        kind: for programs, as in the protocol's ConclusionKind: "too_early", "faster" and so on.
        text: a sentence for people.
        arm, metric: what it is about, the metric by its title; empty if about none.
    """

    kind: str
    text: str
    arm: str = ""
    metric: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The state of an experiment.

    Attributes:
        mismatch: units are not divided as the weights say, so that nothing may be concluded.
        winner: the arm whose decode time per token is shown to be the least; None while that is open.
    """

    arms: list[ArmRow]
    comparisons: list[Comparison]
    violations: list[Violation]
    mismatch: bool
    conclusions: list[Conclusion]
    winner: str | None = None

    @property
    def words(self) -> list[str]:
        """The conclusions for people."""
        return [one.text for one in self.conclusions]


def report(
    split: Split,
    counts: Counts,
    *,
    alpha: float = 0.05,
    limits: Limits | None = None,
    stopped: frozenset[str] = frozenset(),
) -> Report:
    """The report of an experiment.

    Args:
        alpha: shared by the arms that are compared with the control, for each metric by itself.
        stopped: arms whose units are not counted any more.
    """
    running = [arm for arm, name in enumerate(split.arms) if name not in stopped]
    units = counts.sums[..., column("units")].sum(-1)
    mismatch = len(running) > 1 and _is_mismatch(units[running], np.array(split.shares)[running])
    level = alpha / (len(split.arms) - 1)
    compared = [one for arm in range(1, len(split.arms)) for one in _comparisons(split, counts, arm, level)]
    open_arms = [one for one in compared if one.arm not in stopped]
    found = violations(split, counts, limits, stopped)
    rows = [_row(split.arms[arm], counts, arm) for arm in range(len(split.arms))]
    if mismatch:
        return Report(rows, compared, found, mismatch, [*_stops(found), _mismatch(split, units, running)])
    conclusions = _stops(found)
    conclusions += [Conclusion("arm_stopped", f"{name} is stopped.", name) for name in split.arms if name in stopped]
    conclusions += _conclusions(split, units[running], open_arms)
    winner = _winner(split.arms[0], open_arms, {*stopped, *_arms(found)})
    return Report(rows, compared, found, mismatch, conclusions, winner)


def _is_mismatch(units: FloatArray, shares: FloatArray) -> bool:
    """Whether units float64[arm] are divided otherwise than by these shares, which need not sum to 1."""
    return bool(is_rejected(units, shares / shares.sum(), SAMPLE_RATIO_ALPHA))


def _arms(found: list[Violation]) -> set[str]:
    return {one.arm for one in found}


def _winner(control: str, compared: list[Comparison], excluded: set[str]) -> str | None:
    decisive = [one for one in compared if one.metric == TIME_PER_TOKEN.title and one.arm not in excluded]
    better = [one for one in decisive if one.verdict == "better"]
    if better:
        return min(better, key=lambda one: one.change or 0.0).arm
    all_worse = bool(decisive) and all(one.verdict == "worse" for one in decisive)
    return control if all_worse and control not in excluded else None


def _row(name: str, counts: Counts, arm: int) -> ArmRow:
    summed = counts.sums[arm].sum(0)
    values = {metric.title: _known(value_of(counts.sums[arm], metric)) for metric in METRICS}
    for at, latency in enumerate(LATENCIES):
        for p in QUANTILES:
            values[f"{latency} p{100 * p:.0f}"] = _known(quantile(counts.latencies[arm, at], p))
    counted = (int(summed[column(field)]) for field in ("units", "requests", "answered"))
    units, requests, answered = counted
    audited, differing = (int(summed[column(field)]) for field in ("audited", "differing"))
    return ArmRow(name, units, requests, requests - answered, values, audited, differing)


def _comparisons(split: Split, counts: Counts, arm: int, alpha: float) -> list[Comparison]:
    found = []
    for metric in METRICS:
        change = compare(counts.sums[0], counts.sums[arm], metric)
        bounds = change.sequence(alpha)
        found.append(_comparison(split.arms[arm], metric.title, change.log_ratio, bounds, metric.more_is_better))
    for at, latency in enumerate(LATENCIES):
        for p in QUANTILES:
            control, treatment = counts.latencies[0, at], counts.latencies[arm, at]
            bounds = quantile_change(control, treatment, p, alpha)
            estimate = np.log(quantile(treatment, p) / quantile(control, p))
            found.append(_comparison(split.arms[arm], f"{latency} p{100 * p:.0f}", estimate, bounds, False))
    return found


def _comparison(
    arm: str, metric: str, estimate: FloatArray, bounds: tuple[FloatArray, FloatArray], more_is_better: bool
) -> Comparison:
    low, high = bounds
    less, more = bool(high < 0), bool(low > 0)
    verdict = "open" if not less and not more else "better" if more == more_is_better else "worse"
    change, least, most = (_known(np.expm1(one)) for one in (estimate, low, high))
    return Comparison(arm, metric, change, least, most, verdict)


def _known(value: FloatArray | float) -> float | None:
    """The number; None for nan, infinity, and a bound of -100%, which says nothing."""
    return float(value) if math.isfinite(value) and value != -1.0 else None


def _stops(found: list[Violation]) -> list[Conclusion]:
    return [Conclusion("guardrail", f"Stop {one.arm} ({one.guardrail}): {one.reason}.", one.arm) for one in found]


def _mismatch(split: Split, units: FloatArray, running: list[int]) -> Conclusion:
    shares = np.array(split.shares)[running]
    got = ", ".join(f"{split.arms[arm]} {units[arm]:.0f}" for arm in running)
    expected = ", ".join(f"{share:.0%}" for share in shares / shares.sum())
    return Conclusion(
        "sample_ratio_mismatch",
        f"Nothing may be concluded: the units ({got}) are not divided as the weights say ({expected}). Some "
        "requests of an arm are lost or counted twice; find out which before you look at the times.",
    )


def _conclusions(split: Split, units: FloatArray, compared: list[Comparison]) -> list[Conclusion]:
    """On arms that are not stopped, with these units, float64[arm]."""
    if not compared:
        return [Conclusion("no_arm_left", "No arm is left to compare with the control.")]
    if units.min() < LEAST_UNITS:
        text = f"Too early: every arm needs {LEAST_UNITS} units, the smallest has {units.min():.0f}."
        return [Conclusion("too_early", text)]
    found = [_conclusion(one, split.arms[0]) for one in compared if one.metric == TIME_PER_TOKEN.title]
    hold = "The bounds hold however often the report is read"
    undecided = any(one.kind in ("no_difference", "not_comparable") for one in found)
    advice = f"{hold}, and narrow with more units." if undecided else f"{hold}: the experiment may stop now."
    return [*found, Conclusion("note", advice), Conclusion("note", INTERFERENCE)]


def _conclusion(one: Comparison, control: str) -> Conclusion:
    if one.low is None or one.high is None or one.change is None:
        text = f"{one.arm} against {control}: the {one.metric} cannot be compared yet."
        return Conclusion("not_comparable", text, one.arm, one.metric)
    span = f"between {one.low:+.1%} and {one.high:+.1%}"
    if one.verdict == "open":
        text = f"{one.arm} against {control}: no difference is shown; the change of {one.metric} is {span}."
        return Conclusion("no_difference", text, one.arm, one.metric)
    kind = "faster" if one.verdict == "better" else "slower"
    text = f"{one.arm} is {kind} than {control}: {one.metric} {one.change:+.1%}, {span}."
    return Conclusion(kind, text, one.arm, one.metric)
