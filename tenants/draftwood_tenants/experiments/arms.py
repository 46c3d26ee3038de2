"""Who is in which arm: running experiments by tenant, and the arm of a request; and the counts of this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from draftwood_memory.errors import MemoryStoreError
from draftwood_tenants.catalog import Catalog
from draftwood_tenants.experiments.assignment import Split, UnitAssignment
from draftwood_tenants.experiments.counts import Origin, Outcome, Recorder, Snapshot
from draftwood_tenants.experiments.definition import Arm, ExperimentConfig, ExperimentState
from draftwood_tenants.experiments.store import CountStore, EncodedSnapshot, Target, encode

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Between two writes: what a process that is killed loses at most."""


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
        """The label of the arm's memory and metrics: EXPERIMENT/ARM."""
        return label_of(self.experiment.config.name, self.arm.id)


def label_of(experiment: str, arm: str) -> str:
    """The label of an arm's memory and metrics."""
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
        """The arm of an `ArmAssignment.label`; None if its experiment does not run any more.

        Its bucket is always the first: audits are added up over buckets.
        """
        self._follow()
        running = self._by_tenant.get(tenant) or self._by_tenant.get(None)
        name, _, arm_id = label.partition("/")
        if running is None or running.config.name != name or arm_id in running.config.stopped:
            return None
        for index, arm in enumerate(running.config.arms):
            if arm.id == arm_id:
                return ArmAssignment(running, arm, UnitAssignment(index, bucket=0), tenant, request_id, counted=True)
        return None

    def _follow(self) -> None:
        if self._catalog.version == self._version:
            return
        self._version = self._catalog.version
        self._by_tenant = {}
        for config in self._catalog.experiments():
            if config.state is ExperimentState.RUNNING:
                running = Running.of(config)
                self._by_tenant |= dict.fromkeys(config.tenants or (None,), running)


class Counting:
    """Counts the finished requests of this process. For one event loop.

    Args:
        process: names this one; its boot id is used by no other.
        known: the targets of all experiments that exist, whose counts are kept.
    """

    def __init__(self, store: CountStore, process: Origin, known: Callable[[], Iterable[Target]]) -> None:
        self._store = store
        self._process = process
        self._number = count()
        self._known = known
        self._recorders: dict[Target, Recorder] = {}
        self._written: dict[Target, int] = {}
        self._problem = ""

    def record(self, assignment: ArmAssignment, outcome: Outcome) -> None:
        """Counts a finished request."""
        if assignment.counted:
            recorder = self._recorder(assignment.experiment)
            recorder.record(assignment.unit_assignment, assignment.tenant, assignment.unit, outcome)

    def record_audit(self, assignment: ArmAssignment, *, differing: bool) -> None:
        """Counts an answer that was decoded again without drafting."""
        if assignment.counted:
            self._recorder(assignment.experiment).record_audit(assignment.unit_assignment, differing=differing)

    def snapshot(self, target: Target) -> Snapshot | None:
        """What this process has counted of an experiment up to now."""
        recorder = self._recorders.get(target)
        return None if recorder is None else recorder.snapshot()

    async def follow(self) -> None:
        """Writes what is new, each second, until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.write()

    async def write(self) -> None:
        """Writes what is new. If the store does not answer, the next write includes it."""
        for target in self._recorders.keys() - set(self._known()):
            del self._recorders[target]
            self._written.pop(target, None)
        problem = ""
        for target, recorder in tuple(self._recorders.items()):
            snapshot = recorder.snapshot() if recorder.sequence != self._written.get(target, 0) else None
            if snapshot is None:
                continue
            data = await asyncio.to_thread(encode, snapshot)
            try:
                await self._store.write(target, EncodedSnapshot(snapshot.origin, snapshot.sequence, data))
                self._written[target] = snapshot.sequence
            except MemoryStoreError as error:
                problem = str(error)
        if problem and not self._problem:
            _log.warning("counts of experiments cannot be written; they are written later: %s", problem)
        self._problem = problem

    def _recorder(self, experiment: Running) -> Recorder:
        recorder = self._recorders.get(experiment.target)
        if recorder is None:
            # If an experiment is gone for a while, its counts start at 0 beside those that are written.
            origin = Origin(self._process.replica, f"{self._process.boot}.{next(self._number)}")
            recorder = Recorder(origin, len(experiment.config.arms), experiment.measured_from)
            self._recorders[experiment.target] = recorder
        return recorder
