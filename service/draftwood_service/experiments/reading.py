"""The counts of all servers, as this one sees them."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_memory.errors import CorruptValueError
from draftwood_service.experiments.report import report
from draftwood_tenants.experiments.arm_assignment import Running
from draftwood_tenants.experiments.counters import Counts, Origin, Snapshot, merge, total
from draftwood_tenants.experiments.counting import Counting
from draftwood_tenants.experiments.store.base import CountStore, Target
from draftwood_tenants.experiments.store.encoding import decode

_log = structlog.get_logger(__name__)
_MAX_EXPERIMENTS = 16
"""Experiments whose snapshots are kept in RAM, so that only what is new is read."""


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
        found = report(
            self.experiment.split,
            self.counts,
            alpha=config.alpha,
            limits=config.limits,
            stopped=config.stopped,
            unreadable=self.unreadable,
        )
        found.servers = self.servers
        return found


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
        seen = {**{origin: one.sequence for origin, one in known.items()}, **unreadable}
        for stored in await self._store.read(target, seen):
            try:
                found = {stored.origin: decode(stored.origin, arms, stored.data)}
            except CorruptValueError as error:
                _log.error("counts cannot be read", experiment=target.name, process=stored.origin, problem=str(error))
                unreadable[stored.origin] = stored.sequence
                continue
            known.update(merge(known, found))
            unreadable.pop(stored.origin, None)
        own = self._counting.snapshot(target)
        newest = merge(known, {own.origin: own} if own else {})
        lost = unreadable.keys() - newest.keys()
        servers = len({origin.replica for origin in newest})
        return Reading(experiment, total(newest.values(), arms), servers, len(lost))
