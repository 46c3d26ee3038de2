"""Experiments on the live requests of a server."""

from __future__ import annotations

import asyncio
import secrets
import time

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_service.experiments.reading import CountReader
from draftwood_service.experiments.watch import Stop, Watch
from draftwood_tenants.catalog import Catalog
from draftwood_tenants.experiments.arm_assignment import ArmAssigner, Running, target_of
from draftwood_tenants.experiments.counters import Origin
from draftwood_tenants.experiments.counting import Counting
from draftwood_tenants.experiments.definition import ExperimentConfig
from draftwood_tenants.experiments.store.base import CountStore
from draftwood_tenants.resources.ending import end

_WRITE_SECONDS = 2.0
"""For the last counts at the end of a process."""


class LiveExperiments:
    """The experiments of a catalog.

    Attributes:
        assigner: says which arm a request is in.
        counting: counts finished requests.

    Args:
        replica: names this server among those on the store; it may stay the same when it is started again.
    """

    def __init__(self, store: CountStore, catalog: Catalog, replica: str, stop: Stop) -> None:
        origin = Origin(replica, secrets.token_hex(8))
        self._store = store
        self.assigner = ArmAssigner(catalog)
        self.counting = Counting(store, origin, lambda: map(target_of, catalog.experiments()))
        self._reader = CountReader(store, self.counting)
        self._watch = Watch(store, self._reader, catalog, f"{origin.replica}/{origin.boot}", stop)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Writes counts and looks at experiments from now on."""
        self._tasks = [asyncio.create_task(one) for one in (self.counting.follow(), self._watch.follow())]

    async def close(self) -> None:
        """Writes what is counted, and ends."""
        await end(self._tasks)
        if self._tasks:
            await asyncio.wait([asyncio.create_task(self.counting.write())], timeout=_WRITE_SECONDS)

    def count_audit(self, tenant: str, label: str, request_id: str, *, differing: bool) -> None:
        """Counts an answer that was decoded again without drafting, by `ArmAssignment.label` of its request."""
        assignment = self.assigner.of_label(tenant, label, request_id)
        if assignment is not None and time.time() >= assignment.experiment.measured_from:
            self.counting.record_audit(assignment, differing=differing)

    async def report(self, message: pb.Experiment, config: ExperimentConfig) -> pb.ExperimentReport:
        """What was counted on all servers, and what may be concluded. Raises MemoryStoreError."""
        experiment = Running.of(config)
        reading = await self._reader.read(experiment)
        found = await asyncio.to_thread(reading.report)
        found.experiment.CopyFrom(message)
        found.history.extend(await self._watch.points(experiment))
        return found

    async def delete(self, config: ExperimentConfig) -> None:
        """Deletes an experiment's counts. Raises MemoryStoreError."""
        await self._store.delete(target_of(config))
