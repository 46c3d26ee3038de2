"""Experiments on the live requests of a server: which arm a request is in, what it counts for, and the reports."""

from __future__ import annotations

import asyncio
import secrets
import time

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_model_runner.sequence import SequenceStats
from draftwood_service.engine.stream import Sample
from draftwood_service.experiments.report import CountReader
from draftwood_service.experiments.watch import Stop, Watch
from draftwood_tenants.catalog import Catalog
from draftwood_tenants.experiments.arms import ArmAssigner, Counting, Running, target_of
from draftwood_tenants.experiments.counts import Origin, Outcome
from draftwood_tenants.experiments.definition import ExperimentConfig
from draftwood_tenants.experiments.store import CountStore
from draftwood_tenants.resources.follower import end

_ANSWERED = frozenset({"stop", "length"})
_ERRED = frozenset({"internal", "model_failed", "engine_stopped", "deadline_exceeded"})
"""Errors that an arm may cause. A time limit is among them: an arm that is too slow for it would otherwise look faster
without its slowest requests. The caller's cancellation and mistakes, quotas and a full queue are not counted."""
_WRITE_SECONDS = 2.0
"""For the last counts at the end of a process."""


def outcome_of(result: str, samples: list[Sample], arrived_at: float) -> Outcome | None:
    """What is counted of a request; None for nothing.

    Args:
        result: the finish reason, or the reason of an error.
        arrived_at: on the clock of `time.perf_counter`.
    """
    if not samples or result not in _ANSWERED | _ERRED:
        return None
    began = time.time() - (time.perf_counter() - arrived_at)
    if result in _ERRED:
        return Outcome(began, erred=True)
    stats = SequenceStats.over([sample.stats for sample in samples])
    return Outcome(
        arrived_at=began,
        tokens=sum(max(sample.completion_tokens - 1, 0) for sample in samples),
        steps=sum(max(sample.stats.decode_steps - 1, 0) for sample in samples),
        decode_seconds=sum(sample.stats.finished_at - sample.stats.first_token_at for sample in samples),
        ttft_seconds=stats.first_token_at - arrived_at,
        draft_nodes=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
    )


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
        self._tasks = [asyncio.create_task(work) for work in (self.counting.follow(), self._watch.follow())]

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
        answer = await asyncio.to_thread(reading.report)
        answer.experiment.CopyFrom(message)
        answer.history.extend(await self._watch.points(experiment))
        return answer

    async def delete(self, config: ExperimentConfig) -> None:
        """Deletes an experiment's counts. Raises MemoryStoreError."""
        await self._store.delete(target_of(config))
