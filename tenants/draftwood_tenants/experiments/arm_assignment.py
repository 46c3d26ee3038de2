"""Who is in which arm: running experiments by tenant, and the arm of a request."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood_tenants.catalog import Catalog
from draftwood_tenants.experiments.assignment import Split, UnitAssignment
from draftwood_tenants.experiments.definition import Arm, ExperimentConfig, ExperimentState
from draftwood_tenants.experiments.store.base import Target


@dataclass(frozen=True, slots=True)
class ArmAssignment:
    """The arm of a request.

    Attributes:
        arm: what it is drafted with.
        unit: id of the request, or key of the session.
        counted: False for the units of an arm that a guardrail has stopped, which get the control's drafting.
    """

    experiment: Running
    arm: Arm
    unit_assignment: UnitAssignment
    tenant: str
    unit: str
    counted: bool

    @property
    def label(self) -> str:
        """Of the arm's memory and metrics: EXPERIMENT/ARM."""
        return label_of(self.experiment.config.name, self.arm.id)


def label_of(experiment: str, arm: str) -> str:
    """Of an arm's memory and metrics."""
    return f"{experiment}/{arm}"


@dataclass(frozen=True, slots=True)
class Running:
    """An experiment with what follows from its configuration."""

    config: ExperimentConfig
    split: Split
    target: Target

    @classmethod
    def of(cls, config: ExperimentConfig) -> Running:
        return cls(config, config.split, target_of(config))

    @property
    def measured_from(self) -> float:
        """Seconds since the epoch: the end of the burn-in."""
        return (self.config.started_at or 0.0) + self.config.burn_in


def target_of(config: ExperimentConfig) -> Target:
    """Where its counts are."""
    return Target(config.name, config.digest)


class ArmAssigner:
    """The running experiments of a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._version: object = None
        self._by_tenant: dict[str | None, Running] = {}

    def assign(self, tenant: str, *, request_id: str, session: str, overridden: bool) -> ArmAssignment | None:
        """The arm of a request; None if it takes part in no experiment.

        Args:
            session: key of the session; "" if the caller named none.
            overridden: the caller chose strategy or draft limit itself, or no drafts.
        """
        self._follow()
        running = self._by_tenant.get(tenant) or self._by_tenant.get(None)
        if running is None:
            return None
        unit = session if running.config.by_session else request_id
        unit_assignment = running.split.assign(tenant, unit, overridden=overridden) if unit else None
        if unit_assignment is None:
            return None
        arms = running.config.arms
        counted = arms[unit_assignment.arm].id not in running.config.stopped
        arm = arms[unit_assignment.arm] if counted else arms[0]
        return ArmAssignment(running, arm, unit_assignment, tenant, unit, counted)

    def of_label(self, tenant: str, label: str, request_id: str) -> ArmAssignment | None:
        """The arm of a `ArmAssignment.label`; None if its experiment does not run any more.

        Its bucket is always the first: audits are added up over buckets.
        """
        self._follow()
        running = self._by_tenant.get(tenant) or self._by_tenant.get(None)
        name, _, arm_id = label.partition("/")
        if running is None or running.config.name != name or arm_id in running.config.stopped:
            return None
        found = [index for index, arm in enumerate(running.config.arms) if arm.id == arm_id]
        if not found:
            return None
        unit_assignment = UnitAssignment(found[0], bucket=0)
        return ArmAssignment(running, running.config.arms[found[0]], unit_assignment, tenant, request_id, counted=True)

    def _follow(self) -> None:
        if self._catalog.version == self._version:
            return
        self._version = self._catalog.version
        self._by_tenant = {}
        for config in self._catalog.experiments():
            if config.state is ExperimentState.RUNNING:
                running = Running.of(config)
                self._by_tenant |= dict.fromkeys(config.tenants or (None,), running)
