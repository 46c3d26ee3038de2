"""Counts the requests of this process, and writes the counts to the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import count

from draftwood_memory.errors import MemoryStoreError
from draftwood_tenants.experiments.arm_assignment import ArmAssignment, Running
from draftwood_tenants.experiments.counters import Origin, Recorder, Snapshot
from draftwood_tenants.experiments.outcomes import Outcome
from draftwood_tenants.experiments.store.base import CountStore, EncodedSnapshot, Target
from draftwood_tenants.experiments.store.encoding import encode

_log = logging.getLogger(__name__)

SECONDS = 1.0
"""Between two writes: what a process that is killed loses at most."""


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
            await asyncio.sleep(SECONDS)
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
