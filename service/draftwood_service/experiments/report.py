"""The report of an experiment, as the message that callers get: a table, and in plain words what may be concluded.

It is made from the counts of all servers, which `CountReader` adds up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import numpy as np
import structlog

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_memory.errors import CorruptValueError
from draftwood_service.experiments.statistics import (
    MIN_UNITS,
    compare,
    is_rejected,
    quantile_change,
    value_of,
    violations,
)
from draftwood_tenants.experiments.arms import Counting, Running
from draftwood_tenants.experiments.assignment import Limits, Split
from draftwood_tenants.experiments.counts import (
    LATENCIES,
    METRICS,
    TIME_PER_TOKEN,
    Counts,
    FloatArray,
    Origin,
    Snapshot,
    column,
    merge,
    quantile,
    total,
)
from draftwood_tenants.experiments.store import CountStore, Target, decode

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
    "draft budget of a step when it is full; `draftwood bench replay` compares acceptance without that."
)

_log = structlog.get_logger(__name__)
_MAX_EXPERIMENTS = 16
"""Experiments whose snapshots are kept in RAM, so that only what is new is read."""


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
    compared = [
        comparison for arm in range(1, len(split.arms)) for comparison in _comparisons(split, counts, arm, level)
    ]
    open_arms = [comparison for comparison in compared if comparison.arm not in stopped]
    broken = violations(split, counts, limits, stopped)
    findings = [
        _conclusion("guardrail", f"Stop {each.arm} ({each.guardrail}): {each.reason}.", each.arm) for each in broken
    ]
    winner = ""
    if mismatch:
        findings.append(_mismatch(split, units, running))
    else:
        findings += [_conclusion("arm_stopped", f"{name} is stopped.", name) for name in split.arms if name in stopped]
        findings += _conclusions(split, units[running], open_arms)
        winner = _winner(split.arms[0], open_arms, {*stopped, *(violation.arm for violation in broken)})
    if unreadable:
        text = f"The counts of {unreadable} processes cannot be read, and are not in it."
        findings.insert(0, _conclusion("counts_missing", text))
    now = datetime.now(UTC)
    return pb.ExperimentReport(
        report_time=now,
        metrics=[pb.Metric(key=KEYS[title], title=title) for title in _titles()],
        arms=[_row(name, counts, arm) for arm, name in enumerate(split.arms)],
        comparisons=compared,
        sample_ratio_mismatch=mismatch,
        violations=[pb.StoppedArm(**asdict(violation), stop_time=now) for violation in broken],
        conclusions=findings,
        better_arm=winner,
    )


def deciding(compared: Iterable[pb.ArmComparison]) -> list[pb.ArmComparison]:
    """The comparisons of the deciding metric."""
    return [comparison for comparison in compared if comparison.metric == KEYS[TIME_PER_TOKEN.title]]


def _conclusion(kind: str, text: str, arm: str = "", metric: str = "") -> pb.Conclusion:
    """A conclusion: a sentence, and the key of the metric that it is about."""
    return pb.Conclusion(kind=f"CONCLUSION_KIND_{kind.upper()}", arm=arm, metric=metric, text=text)


def _titles() -> list[str]:
    return [*(metric.title for metric in METRICS), *QUANTILES]


def _is_mismatch(units: FloatArray, shares: FloatArray) -> bool:
    """Whether units float64[arm] are divided otherwise than by these shares, which need not sum to 1."""
    return bool(is_rejected(units, shares / shares.sum(), SAMPLE_RATIO_ALPHA))


def _winner(control: str, compared: list[pb.ArmComparison], excluded: set[str]) -> str:
    """The arm whose decode time per token is shown to be the least; empty while that is open."""
    decisive = [comparison for comparison in deciding(compared) if comparison.arm not in excluded]
    if better := [comparison for comparison in decisive if comparison.verdict == pb.VERDICT_BETTER]:
        return min(better, key=lambda comparison: comparison.change).arm
    all_worse = bool(decisive) and all(comparison.verdict == pb.VERDICT_WORSE for comparison in decisive)
    return control if all_worse and control not in excluded else ""


def _row(name: str, counts: Counts, arm: int) -> pb.ArmRow:
    summed = counts.sums[arm].sum(0)
    values = {metric.title: _known(value_of(counts.sums[arm], metric)) for metric in METRICS}
    values |= {title: _known(quantile(counts.latencies[arm, at], p)) for title, (at, p, _) in QUANTILES.items()}
    known = {KEYS[title]: value for title, value in values.items() if value is not None}
    counted = {field: int(summed[column(field)]) for field in ("units", "requests", "audited", "differing")}
    return pb.ArmRow(
        arm=name,
        **counted,
        errors=counted["requests"] - int(summed[column("answered")]),
        metrics=known,
    )


def _comparisons(split: Split, counts: Counts, arm: int, alpha: float) -> list[pb.ArmComparison]:
    comparisons = []
    for metric in METRICS:
        change = compare(counts.sums[0], counts.sums[arm], metric)
        bounds = change.sequence(alpha)
        comparisons.append(_comparison(split.arms[arm], metric.title, change.log_ratio, bounds, metric.more_is_better))
    for title, (at, p, _) in QUANTILES.items():
        control, treatment = counts.latencies[0, at], counts.latencies[arm, at]
        bounds = quantile_change(control, treatment, p, alpha)
        estimate = np.log(quantile(treatment, p) / quantile(control, p))
        comparisons.append(_comparison(split.arms[arm], title, estimate, bounds, False))
    return comparisons


def _comparison(
    arm: str, metric: str, estimate: FloatArray, bounds: tuple[FloatArray, FloatArray], more_is_better: bool
) -> pb.ArmComparison:
    low, high = bounds
    verdict = pb.VERDICT_OPEN
    if high < 0 or low > 0:
        verdict = pb.VERDICT_BETTER if (low > 0) == more_is_better else pb.VERDICT_WORSE
    change, lower, upper = (_known(np.expm1(log_ratio)) for log_ratio in (estimate, low, high))
    return pb.ArmComparison(arm=arm, metric=KEYS[metric], change=change, low=lower, high=upper, verdict=verdict)


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
    conclusions = [_of_comparison(comparison, split.arms[0]) for comparison in deciding(compared)]
    hold = "The bounds hold however often the report is read"
    undecided = {pb.CONCLUSION_KIND_NO_DIFFERENCE, pb.CONCLUSION_KIND_NOT_COMPARABLE} & {
        conclusion.kind for conclusion in conclusions
    }
    advice = f"{hold}, and narrow with more units." if undecided else f"{hold}: the experiment may stop now."
    return [*conclusions, _conclusion("note", advice), _conclusion("note", INTERFERENCE)]


def _of_comparison(comparison: pb.ArmComparison, control: str) -> pb.Conclusion:
    """Of the deciding metric."""
    title = TIME_PER_TOKEN.title
    if not (comparison.HasField("low") and comparison.HasField("high") and comparison.HasField("change")):
        text = f"{comparison.arm} against {control}: the {title} cannot be compared yet."
        return _conclusion("not_comparable", text, comparison.arm, comparison.metric)
    span = f"between {comparison.low:+.1%} and {comparison.high:+.1%}"
    if comparison.verdict == pb.VERDICT_OPEN:
        text = f"{comparison.arm} against {control}: no difference is shown; the change of {title} is {span}."
        return _conclusion("no_difference", text, comparison.arm, comparison.metric)
    kind = "faster" if comparison.verdict == pb.VERDICT_BETTER else "slower"
    text = f"{comparison.arm} is {kind} than {control}: {title} {comparison.change:+.1%}, {span}."
    return _conclusion(kind, text, comparison.arm, comparison.metric)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was counted on all servers.

    Attributes:
        unreadable: processes whose counts cannot be read: damaged, or of a newer version of this program.
    """

    experiment: Running
    counts: Counts
    servers: int
    unreadable: int

    def report(self) -> pb.ExperimentReport:
        """What may be concluded from it; without the experiment itself, and its history."""
        config = self.experiment.config
        message = report(
            self.experiment.split,
            self.counts,
            alpha=config.alpha,
            limits=config.limits,
            stopped=config.stopped,
            unreadable=self.unreadable,
        )
        message.servers = self.servers
        return message


class CountReader:
    """Reads the counts of experiments; those of this process as of now."""

    def __init__(self, store: CountStore, counting: Counting) -> None:
        self._store = store
        self._counting = counting
        self._snapshots: dict[Target, dict[Origin, Snapshot]] = {}
        self._unreadable: dict[Target, dict[Origin, int]] = {}

    async def read(self, experiment: Running) -> Reading:
        """Raises MemoryStoreError."""
        target, arms = experiment.target, len(experiment.config.arms)
        if target not in self._snapshots and len(self._snapshots) == _MAX_EXPERIMENTS:
            oldest = next(iter(self._snapshots))
            del self._snapshots[oldest]
            self._unreadable.pop(oldest, None)
        known = self._snapshots.setdefault(target, {})
        unreadable = self._unreadable.setdefault(target, {})
        seen = {**{origin: snapshot.sequence for origin, snapshot in known.items()}, **unreadable}
        for stored in await self._store.read(target, seen):
            try:
                decoded = {stored.origin: decode(stored.origin, arms, stored.data)}
            except CorruptValueError as error:
                _log.error("counts cannot be read", experiment=target.name, process=stored.origin, problem=str(error))
                unreadable[stored.origin] = stored.sequence
                continue
            known.update(merge(known, decoded))
            unreadable.pop(stored.origin, None)
        here = self._counting.snapshot(target)
        newest = merge(known, {here.origin: here} if here else {})
        lost = unreadable.keys() - newest.keys()
        servers = len({origin.replica for origin in newest})
        return Reading(experiment, total(newest.values(), arms), servers, len(lost))
