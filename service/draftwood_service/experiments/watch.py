"""One server looks at the running experiments for all: it stops arms that break a guardrail, and keeps looks for a
plot."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable

import structlog
from google.protobuf.message import DecodeError

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_memory.errors import CorruptValueError, MemoryStoreError
from draftwood_service.experiments.reading import CountReader
from draftwood_service.experiments.report import deciding
from draftwood_tenants.catalog import Catalog
from draftwood_tenants.experiments.arm_assignment import Running
from draftwood_tenants.experiments.definition import ExperimentState
from draftwood_tenants.experiments.store.base import CountStore, Target

_log = structlog.get_logger(__name__)

SECONDS = 3.0
"""Between two looks. An arm that fails at once is stopped soon after its hundredth unit."""
_LEASE_SECONDS = 10.0
"""Seconds after which another server acquires the lease of one that died."""

# Looks that are kept, for a plot over time. Later ones are further apart: a year has 500 of them.
MIN_SECONDS, SHARE_OF_AGE = 10.0, 0.025
"""Between two looks: as long, or this share of the experiment's age."""
_MAX_LOOKS = 600
_MAX_BYTES = 4 * 2**20

Stop = Callable[[Running, Iterable[pb.StoppedArm]], Awaitable[None]]
"""Writes stopped arms into an experiment."""


class Watch:
    """Looks at running experiments.

    Args:
        process: identifies this one.
        stop: raises `MemoryStoreError` if it cannot be written.
    """

    def __init__(self, store: CountStore, reader: CountReader, catalog: Catalog, process: str, stop: Stop) -> None:
        self._store = store
        self._reader = reader
        self._catalog = catalog
        self._process = process
        self._stop = stop
        self._reported: set[tuple[Target, str, str]] = set()
        self._problem = ""

    async def follow(self) -> None:
        """Looks every `SECONDS`, until it is cancelled."""
        while True:
            await asyncio.sleep(SECONDS)
            await self.look()

    async def look(self) -> None:
        """One look, if this server holds the lease. A store that does not answer is no error."""
        problem = ""
        try:
            if await self._store.acquire_lease(self._process, _LEASE_SECONDS):
                running = [one for one in self._catalog.experiments() if one.state is ExperimentState.RUNNING]
                for config in running:
                    await self._look_at(Running.of(config))
        except MemoryStoreError as error:
            problem = str(error)
            if not self._problem:
                _log.warning("experiments cannot be watched", problem=problem)
        except Exception:
            _log.exception("experiments cannot be watched")  # the next look may succeed
        self._problem = problem

    async def _look_at(self, experiment: Running) -> None:
        reading = await self._reader.read(experiment)
        found = await asyncio.to_thread(reading.report)
        await self._keep(experiment, found)
        new = [one for one in found.violations if (experiment.target, one.arm, one.guardrail) not in self._reported]
        for one in new:
            event = "a guardrail is broken" if experiment.config.report_only else "a guardrail stops an arm"
            _log.error(
                event, experiment=experiment.config.name, arm=one.arm, guardrail=one.guardrail, reason=one.reason
            )
        if found.violations and not experiment.config.report_only:
            await self._stop(experiment, found.violations)
        self._reported |= {(experiment.target, one.arm, one.guardrail) for one in new}

    async def _keep(self, experiment: Running, found: pb.ExperimentReport) -> None:
        points = await self.points(experiment)
        now = found.time.ToNanoseconds() * 1e-9
        if is_due(points, experiment.config.started_at or now, now):
            point = pb.ReportPoint(time=found.time, comparisons=deciding(found.comparisons))
            await self._store.write_history(experiment.target, encode([*points, point]))

    async def points(self, experiment: Running) -> list[pb.ReportPoint]:
        """The looks that are kept, the oldest first. Raises MemoryStoreError."""
        try:
            return decode(await self._store.read_history(experiment.target))
        except CorruptValueError as error:
            _log.error("looks at an experiment are lost", experiment=experiment.config.name, problem=str(error))
            return []


def is_due(points: list[pb.ReportPoint], started_at: float, now: float) -> bool:
    """Whether it is time for another look; times in seconds since the epoch."""
    if not points:
        return True
    last = points[-1].time.ToNanoseconds() * 1e-9
    return now - last >= max(MIN_SECONDS, SHARE_OF_AGE * (now - started_at))


def encode(points: list[pb.ReportPoint]) -> bytes:
    return zlib.compress(pb.ExperimentReport(history=points[-_MAX_LOOKS:]).SerializeToString())


def decode(data: bytes) -> list[pb.ReportPoint]:
    """Raises CorruptValueError."""
    if not data:
        return []
    try:
        return [*pb.ExperimentReport.FromString(zlib.decompressobj().decompress(data, _MAX_BYTES)).history]
    except (zlib.error, DecodeError) as error:
        raise CorruptValueError(f"looks at an experiment: {error}") from None
