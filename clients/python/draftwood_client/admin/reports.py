"""Reports of experiments as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from draftwood_client.admin.resources import Experiment, StoppedArm


@dataclass(frozen=True, slots=True)
class ArmRow:
    """What was counted of an arm.

    Attributes:
        metrics: by title, for people; a metric without a value is missing.
        audited, differing: answers that were decoded again, and those that differ.
        values: the same metrics by key, such as "decode_seconds_per_token"; keys do not change.
    """

    arm: str
    units: int = 0
    requests: int = 0
    errors: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    audited: int = 0
    differing: int = 0
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArmComparison:
    """The relative change of a metric from the control to an arm, -0.1 being 10% less.

    Attributes:
        metric: its title; `metric_key` is the key of `ArmRow.values`.
        change: None without a value.
        low, high: bounds that hold at every look; None where there is none yet.
        verdict: "open", "better" or "worse".
    """

    arm: str
    metric: str
    change: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = ""
    metric_key: str = ""


@dataclass(frozen=True, slots=True)
class ReportPoint:
    """An earlier look at the first metric."""

    time: datetime
    comparisons: tuple[ArmComparison, ...] = ()


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What may be concluded.

    Attributes:
        kind: "note", "guardrail", "arm_stopped", "sample_ratio_mismatch", "counts_missing", "no_arm_left", "too_early",
            "not_comparable", "no_difference", "faster" or "slower".
        arm, metric_key: what it is about; "" if about none.
        text: the sentence for people.
    """

    kind: str
    arm: str = ""
    metric_key: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class ExperimentReport:
    """What was counted on all servers, and what may be concluded from it at this moment.

    Attributes:
        comparisons: every other arm against the control.
        sample_ratio_mismatch: units are not divided as the weights say, so that nothing may be concluded.
        violations: arms that a guardrail says to stop.
        conclusions: sentences for people; `findings` is the same for programs.
        history: earlier looks, the oldest first.
        better_arm: the arm that `conclude` takes if none is named; "" while that is open.
    """

    experiment: Experiment
    time: datetime | None = None
    servers: int = 0
    arms: tuple[ArmRow, ...] = ()
    comparisons: tuple[ArmComparison, ...] = ()
    sample_ratio_mismatch: bool = False
    violations: tuple[StoppedArm, ...] = ()
    conclusions: tuple[str, ...] = ()
    history: tuple[ReportPoint, ...] = ()
    findings: tuple[Conclusion, ...] = ()
    better_arm: str = ""
