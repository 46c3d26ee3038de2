"""The definition of an experiment, validated, and the changes that each of its states allows."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from draftwood_strategies.drafting import DraftChoice
from draftwood_tenants.experiments.assignment import ExperimentError, Limits, Split, require_allowed_change

MAX_ARMS = 8
_ID = re.compile(r"[a-z][a-z0-9-]{0,62}")


class ExperimentState(Enum):
    DRAFT = "draft"
    RUNNING = "running"
    STOPPED = "stopped"
    CONCLUDED = "concluded"


class StateError(ExperimentError):
    """The state of an experiment does not allow what was asked for."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A way of drafting.

    Attributes:
        forked: its memory begins with what the tenant's has; otherwise empty.
    """

    id: str
    drafting: DraftChoice
    weight: float = 1.0
    forked: bool = False


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """An experiment as requests are assigned to it.

    Attributes:
        arms: the first is the control.
        by_session: units are sessions; otherwise requests.
        tenants: that take part; None for all.
        burn_in: seconds after the start that are not counted.
        report_only: guardrails stop nothing.
        started_at: seconds since the epoch; None in a draft.
        stopped: arms that a guardrail has stopped.

    Raises:
        ExperimentError: a value is not allowed; the text begins with the field.
    """

    name: str
    salt: bytes
    arms: tuple[Arm, ...]
    coverage: float = 1.0
    by_session: bool = False
    tenants: frozenset[str] | None = None
    burn_in: float = 0.0
    alpha: float = 0.05
    limits: Limits = field(default_factory=Limits)
    report_only: bool = False
    state: ExperimentState = ExperimentState.DRAFT
    started_at: float | None = None
    stopped: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        require_id("name", self.name)
        if not 2 <= len(self.arms) <= MAX_ARMS:
            raise ExperimentError(f"arms: {len(self.arms)} of them; 2 to {MAX_ARMS} are needed")
        for index, arm in enumerate(self.arms):
            require_id(f"arms[{index}].id", arm.id)
            if not (math.isfinite(arm.weight) and arm.weight > 0):
                raise ExperimentError(f"arms[{index}].weight: {arm.weight} is not allowed; it must be above 0")
        if not 0.0 < self.coverage <= 1.0:
            raise ExperimentError(f"coverage: {self.coverage} is not allowed; it must be above 0 and at most 1")
        if not 0.0 < self.alpha < 1.0:
            raise ExperimentError(f"alpha: {self.alpha} is not allowed; it must be between 0 and 1")
        _ = self.split

    @property
    def digest(self) -> str:
        """Identifies what cannot change while it runs, 16 hexadecimal digits."""
        frozen = (self.arms, self.by_session, sorted(self.tenants or ()), self.burn_in, self.started_at)
        return hashlib.sha256(self.salt + repr((self.name, frozen)).encode()).hexdigest()[:16]

    @property
    def split(self) -> Split:
        """How units are divided."""
        ids, weights = tuple(arm.id for arm in self.arms), tuple(arm.weight for arm in self.arms)
        return Split(self.salt, ids, weights, self.coverage, self.tenants)


def require_id(field_name: str, text: str) -> None:
    """Raises ExperimentError."""
    if not _ID.fullmatch(text):
        problem = "1 to 63 characters, a to z, 0 to 9 and -, beginning with a letter, are needed"
        raise ExperimentError(f"{field_name}: {text[:80]!r}; {problem}")


def require_update(former: ExperimentConfig, changed: ExperimentConfig) -> None:
    """Raises StateError unless the experiment's state allows this change; the description is no part of it."""
    if former.state is ExperimentState.DRAFT:
        return
    if former.state is not ExperimentState.RUNNING:
        if former != changed:
            raise StateError(f"state: {former.state.value}; only the description can be changed")
        return
    try:
        require_allowed_change(former.split, changed.split)
    except ExperimentError as error:
        raise StateError(str(error)) from None
    free = replace(former, coverage=changed.coverage, limits=changed.limits, report_only=changed.report_only)
    if free != changed:
        problem = "only coverage (upwards), guardrails and description can be changed"
        raise StateError(f"state: {former.state.value}; {problem}")


def require_no_overlap(experiment: ExperimentConfig, others: Iterable[ExperimentConfig]) -> None:
    """Raises StateError if another experiment runs that has a tenant in common with it."""
    for other in others:
        if other.name == experiment.name or other.state is not ExperimentState.RUNNING:
            continue
        if experiment.tenants is None or other.tenants is None:
            raise StateError(f"tenants: {other.name} is running, and one of the two is for all tenants")
        if common := experiment.tenants & other.tenants:
            raise StateError(f"tenants: {min(common)[:80]} is in {other.name}, which is running")


def require_state(experiment: ExperimentConfig, done: str, *allowed: ExperimentState) -> None:
    """Raises StateError unless the experiment is in one of these states."""
    if experiment.state not in allowed:
        needed = " or ".join(state.value for state in allowed)
        raise StateError(f"state: {experiment.state.value}; only one that is {needed} can be {done}")
