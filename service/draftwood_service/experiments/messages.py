"""Reports as messages."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_service.experiments.reading import Reading
from draftwood_service.experiments.statistics.guardrails import Violation
from draftwood_service.experiments.statistics.report import KEYS, ArmRow, Comparison, Conclusion, Report
from draftwood_tenants.experiments.outcomes import TIME_PER_TOKEN

_VERDICTS = {"open": pb.VERDICT_OPEN, "better": pb.VERDICT_BETTER, "worse": pb.VERDICT_WORSE}


def report_message(
    experiment: pb.Experiment, reading: Reading, found: Report, history: Iterable[pb.ReportPoint]
) -> pb.ExperimentReport:
    """The answer of GetExperimentReport."""
    return pb.ExperimentReport(
        time=datetime.now(UTC),
        experiment=experiment,
        servers=reading.servers,
        arms=map(_row, found.arms),
        comparisons=map(_comparison, found.comparisons),
        sample_ratio_mismatch=found.mismatch,
        violations=[stopped_arm(one) for one in found.violations],
        conclusions=found.words,
        history=history,
        findings=map(_finding, found.conclusions),
        better_arm=found.winner or "",
    )


def point(found: Report, now: float) -> pb.ReportPoint:
    """A look at the deciding metric; `now` in seconds since the epoch."""
    deciding = [one for one in found.comparisons if one.metric == TIME_PER_TOKEN.title]
    return pb.ReportPoint(comparisons=map(_comparison, deciding), time=datetime.fromtimestamp(now, UTC))


def stopped_arm(violation: Violation) -> pb.StoppedArm:
    """As of now."""
    return pb.StoppedArm(
        arm=violation.arm, guardrail=violation.guardrail, reason=violation.reason, stop_time=datetime.now(UTC)
    )


def _row(row: ArmRow) -> pb.ArmRow:
    known = {title: value for title, value in row.values.items() if value is not None}
    return pb.ArmRow(
        arm=row.arm,
        units=row.units,
        requests=row.requests,
        errors=row.errors,
        metrics=known,
        audited=row.audited,
        differing=row.differing,
        values={KEYS[title]: value for title, value in known.items()},
    )


def _comparison(one: Comparison) -> pb.ArmComparison:
    return pb.ArmComparison(
        arm=one.arm,
        metric=one.metric,
        change=one.change,
        low=one.low,
        high=one.high,
        verdict=_VERDICTS[one.verdict],
        metric_key=KEYS[one.metric],
    )


def _finding(one: Conclusion) -> pb.Conclusion:
    kind = f"CONCLUSION_KIND_{one.kind.upper()}"
    return pb.Conclusion(kind=kind, arm=one.arm, metric_key=KEYS[one.metric] if one.metric else "", text=one.text)
