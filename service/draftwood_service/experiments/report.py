"""The report of an experiment: a table, and in plain words what may be concluded, as the message that callers get."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime

import numpy as np

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_service.experiments.statistics.guardrails import violations
from draftwood_service.experiments.statistics.mixture import is_rejected, quantile_change
from draftwood_service.experiments.statistics.ratios import MIN_UNITS, compare, value_of
from draftwood_tenants.experiments.assignment import Split
from draftwood_tenants.experiments.counters import LATENCIES, Counts
from draftwood_tenants.experiments.latencies import quantile
from draftwood_tenants.experiments.limits import Limits
from draftwood_tenants.experiments.outcomes import METRICS, TIME_PER_TOKEN, FloatArray, column

QUANTILES = {
    f"{latency} p{100 * p:.0f}": (at, p, f"{latency}_seconds_p{100 * p:.0f}")
    for at, latency in enumerate(LATENCIES)
    for p in (0.5, 0.9)
}
"""By title: which latency, the probability, and the key for programs."""
KEYS = {metric.title: metric.key for metric in METRICS} | {title: key for title, (_, _, key) in QUANTILES.items()}
"""Of each metric's title, its key for programs; keys are a part of the protocol."""
SAMPLE_RATIO_ALPHA = 0.01
INTERFERENCE = (
    "Arms share steps: a step lasts equally long for all requests in it. So differences in time are smaller here than "
    "between services that each run one arm, and a difference that is found is a lower bound. Arms also share the "
    "draft budget of a step when it is full; `draftwood experiment replay` compares acceptance without that."
)


def report(
    split: Split,
    counts: Counts,
    *,
    alpha: float = 0.05,
    limits: Limits | None = None,
    stopped: frozenset[str] = frozenset(),
    unreadable: int = 0,
) -> pb.ExperimentReport:
    """The report of an experiment, without the experiment itself, its servers and its history.

    Args:
        alpha: shared by the arms that are compared with the control, for each metric by itself.
        stopped: arms that a guardrail has stopped: their units are no longer counted.
        unreadable: processes whose counts are missing.
    """
    running = [arm for arm, name in enumerate(split.arms) if name not in stopped]
    units = counts.sums[..., column("units")].sum(-1)
    mismatch = len(running) > 1 and _is_mismatch(units[running], np.array(split.shares)[running])
    level = alpha / (len(split.arms) - 1)
    compared = [one for arm in range(1, len(split.arms)) for one in _comparisons(split, counts, arm, level)]
    open_arms = [one for one in compared if one.arm not in stopped]
    found = violations(split, counts, limits, stopped)
    findings = [_conclusion("guardrail", f"Stop {one.arm} ({one.guardrail}): {one.reason}.", one.arm) for one in found]
    winner = ""
    if mismatch:
        findings.append(_mismatch(split, units, running))
    else:
        findings += [_conclusion("arm_stopped", f"{name} is stopped.", name) for name in split.arms if name in stopped]
        findings += _conclusions(split, units[running], open_arms)
        winner = _winner(split.arms[0], open_arms, {*stopped, *(one.arm for one in found)})
    if unreadable:
        text = f"The counts of {unreadable} processes cannot be read, and are not in it."
        findings.insert(0, _conclusion("counts_missing", text))
    now = datetime.now(UTC)
    return pb.ExperimentReport(
        time=now,
        arms=[_row(name, counts, arm) for arm, name in enumerate(split.arms)],
        comparisons=compared,
        sample_ratio_mismatch=mismatch,
        violations=[pb.StoppedArm(**asdict(one), stop_time=now) for one in found],
        conclusions=[one.text for one in findings],
        findings=findings,
        better_arm=winner,
    )


def deciding(compared: Iterable[pb.ArmComparison]) -> list[pb.ArmComparison]:
    """The comparisons of the deciding metric."""
    return [one for one in compared if one.metric == TIME_PER_TOKEN.title]


def _conclusion(kind: str, text: str, arm: str = "", metric: str = "") -> pb.Conclusion:
    """A conclusion: a sentence, and the title of the metric that it is about."""
    key = KEYS[metric] if metric else ""
    return pb.Conclusion(kind=f"CONCLUSION_KIND_{kind.upper()}", arm=arm, metric_key=key, text=text)


def _is_mismatch(units: FloatArray, shares: FloatArray) -> bool:
    """Whether units float64[arm] are divided otherwise than by these shares, which need not sum to 1."""
    return bool(is_rejected(units, shares / shares.sum(), SAMPLE_RATIO_ALPHA))


def _winner(control: str, compared: list[pb.ArmComparison], excluded: set[str]) -> str:
    """The arm whose decode time per token is shown to be the least; empty while that is open."""
    decisive = [one for one in deciding(compared) if one.arm not in excluded]
    if better := [one for one in decisive if one.verdict == pb.VERDICT_BETTER]:
        return min(better, key=lambda one: one.change).arm
    all_worse = bool(decisive) and all(one.verdict == pb.VERDICT_WORSE for one in decisive)
    return control if all_worse and control not in excluded else ""


def _row(name: str, counts: Counts, arm: int) -> pb.ArmRow:
    summed = counts.sums[arm].sum(0)
    values = {metric.title: _known(value_of(counts.sums[arm], metric)) for metric in METRICS}
    values |= {title: _known(quantile(counts.latencies[arm, at], p)) for title, (at, p, _) in QUANTILES.items()}
    known = {title: value for title, value in values.items() if value is not None}
    counted = {field: int(summed[column(field)]) for field in ("units", "requests", "audited", "differing")}
    return pb.ArmRow(
        arm=name,
        **counted,
        errors=counted["requests"] - int(summed[column("answered")]),
        metrics=known,
        values={KEYS[title]: value for title, value in known.items()},
    )


def _comparisons(split: Split, counts: Counts, arm: int, alpha: float) -> list[pb.ArmComparison]:
    found = []
    for metric in METRICS:
        change = compare(counts.sums[0], counts.sums[arm], metric)
        bounds = change.sequence(alpha)
        found.append(_comparison(split.arms[arm], metric.title, change.log_ratio, bounds, metric.more_is_better))
    for title, (at, p, _) in QUANTILES.items():
        control, treatment = counts.latencies[0, at], counts.latencies[arm, at]
        bounds = quantile_change(control, treatment, p, alpha)
        estimate = np.log(quantile(treatment, p) / quantile(control, p))
        found.append(_comparison(split.arms[arm], title, estimate, bounds, False))
    return found


def _comparison(
    arm: str, metric: str, estimate: FloatArray, bounds: tuple[FloatArray, FloatArray], more_is_better: bool
) -> pb.ArmComparison:
    low, high = bounds
    verdict = pb.VERDICT_OPEN
    if high < 0 or low > 0:
        verdict = pb.VERDICT_BETTER if (low > 0) == more_is_better else pb.VERDICT_WORSE
    change, least, most = (_known(np.expm1(one)) for one in (estimate, low, high))
    return pb.ArmComparison(
        arm=arm, metric=metric, metric_key=KEYS[metric], change=change, low=least, high=most, verdict=verdict
    )


def _known(value: FloatArray | float) -> float | None:
    """The number; None for nan, infinity, and a bound of -100%, which says nothing."""
    return float(value) if math.isfinite(value) and value != -1.0 else None


def _mismatch(split: Split, units: FloatArray, running: list[int]) -> pb.Conclusion:
    shares = np.array(split.shares)[running]
    got = ", ".join(f"{split.arms[arm]} {units[arm]:.0f}" for arm in running)
    expected = ", ".join(f"{share:.0%}" for share in shares / shares.sum())
    return _conclusion(
        "sample_ratio_mismatch",
        f"Nothing may be concluded: the units ({got}) are not divided as the weights say ({expected}). Some "
        "requests of an arm are lost or counted twice; find out which before you look at the times.",
    )


def _conclusions(split: Split, units: FloatArray, compared: list[pb.ArmComparison]) -> list[pb.Conclusion]:
    """On arms that are not stopped, with these units, float64[arm]."""
    if not compared:
        return [_conclusion("no_arm_left", "No arm is left to compare with the control.")]
    if units.min() < MIN_UNITS:
        text = f"Too early: every arm needs {MIN_UNITS} units, the smallest has {units.min():.0f}."
        return [_conclusion("too_early", text)]
    found = [_of_comparison(one, split.arms[0]) for one in deciding(compared)]
    hold = "The bounds hold however often the report is read"
    undecided = {pb.CONCLUSION_KIND_NO_DIFFERENCE, pb.CONCLUSION_KIND_NOT_COMPARABLE} & {one.kind for one in found}
    advice = f"{hold}, and narrow with more units." if undecided else f"{hold}: the experiment may stop now."
    return [*found, _conclusion("note", advice), _conclusion("note", INTERFERENCE)]


def _of_comparison(one: pb.ArmComparison, control: str) -> pb.Conclusion:
    if not (one.HasField("low") and one.HasField("high") and one.HasField("change")):
        text = f"{one.arm} against {control}: the {one.metric} cannot be compared yet."
        return _conclusion("not_comparable", text, one.arm, one.metric)
    span = f"between {one.low:+.1%} and {one.high:+.1%}"
    if one.verdict == pb.VERDICT_OPEN:
        text = f"{one.arm} against {control}: no difference is shown; the change of {one.metric} is {span}."
        return _conclusion("no_difference", text, one.arm, one.metric)
    kind = "faster" if one.verdict == pb.VERDICT_BETTER else "slower"
    text = f"{one.arm} is {kind} than {control}: {one.metric} {one.change:+.1%}, {span}."
    return _conclusion(kind, text, one.arm, one.metric)
