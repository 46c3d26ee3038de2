"""One server looks at the running experiments for all: it stops arms that break a guardrail, and keeps its looks."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable

import structlog
from google.protobuf.message import DecodeError

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood.admin.v1 import tenants_pb2
from draftwood_memory.errors import CorruptValueError, MemoryStoreError
from draftwood_service.experiments.report import CountReader, deciding
from draftwood_tenants.catalog import Catalog, write_of
from draftwood_tenants.experiments.arms import Running
from draftwood_tenants.experiments.definition import ExperimentState
from draftwood_tenants.experiments.store import CountStore, Target
from draftwood_tenants.resources.follower import ResourceFollower
from draftwood_tenants.resources.store import STOPS, ConflictError, Write

_log = structlog.get_logger(__name__)
_audit = structlog.get_logger("draftwood.audit")

POLL_SECONDS = 3.0
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
_TRIES = 8


async def stop_arms(
    stored: ResourceFollower, catalog: Catalog, experiment: Running, violated: Iterable[pb.StoppedArm]
) -> None:
    """Adds stopped arms to the experiment, unless it does not run any more or is another one by now; stops it if no
    comparison is left.

    Raises:
        MemoryStoreError: it cannot be written.
    """
    name, digest = experiment.config.name, experiment.config.digest
    for _ in range(_TRIES):
        await stored.refresh()
        current = catalog.experiment_message(name)
        digests = [known.digest for known in catalog.experiments() if known.name == name]
        if current is None or current.state != pb.EXPERIMENT_STATE_RUNNING or digests != [digest]:
            return
        changed = pb.Experiment()
        changed.CopyFrom(current)
        new = _stop(changed, violated)
        if not new:
            return
        try:
            await stored.write([_write(catalog, name, digest, changed)])
        except ConflictError:
            continue
        for stopped in new:
            _audit.info(
                "resource",
                action="stop_arm",
                resource=f"experiments/{name}",
                principal="guardrail",
                arm=stopped.arm,
                guardrail=stopped.guardrail,
                reason=stopped.reason,
                ended=changed.state == pb.EXPERIMENT_STATE_STOPPED,
                result="ok",
            )
        return


def _write(catalog: Catalog, name: str, digest: str, changed: pb.Experiment) -> Write:
    if changed.origin != tenants_pb2.RESOURCE_ORIGIN_FILE:
        return write_of(changed)
    stop = pb.Experiment(salt=digest, stopped_arms=changed.stopped_arms)
    if changed.state == pb.EXPERIMENT_STATE_STOPPED:
        stop.state = changed.state
        stop.end_time.CopyFrom(changed.end_time)
    return Write(STOPS, name, stop.SerializeToString(), catalog.stops_revision(name))


def _stop(experiment: pb.Experiment, violated: Iterable[pb.StoppedArm]) -> list[pb.StoppedArm]:
    """Adds the first violation of each arm that runs, and stops the experiment if nothing is left to compare."""
    stopped = {ended.arm for ended in experiment.stopped_arms}
    new = []
    for stop in violated:
        if stop.arm not in stopped:
            stopped.add(stop.arm)
            new.append(stop)
    experiment.stopped_arms.extend(new)
    control, *others = (arm.id for arm in experiment.arms)
    if control in stopped or stopped.issuperset(others):
        experiment.state = pb.EXPERIMENT_STATE_STOPPED
        experiment.end_time.GetCurrentTime()
    return new


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
        """Looks every `POLL_SECONDS`, until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.look()

    async def look(self) -> None:
        """One look, if this server holds the lease. A store that does not answer is no error."""
        problem = ""
        try:
            if await self._store.acquire_lease(self._process, _LEASE_SECONDS):
                running = [
                    experiment
                    for experiment in self._catalog.experiments()
                    if experiment.state is ExperimentState.RUNNING
                ]
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
        report = await asyncio.to_thread(reading.report)
        await self._keep(experiment, report)
        new = [
            violation
            for violation in report.violations
            if (experiment.target, violation.arm, violation.guardrail) not in self._reported
        ]
        for violation in new:
            event = "a guardrail is broken" if experiment.config.report_only else "a guardrail stops an arm"
            _log.error(
                event,
                experiment=experiment.config.name,
                arm=violation.arm,
                guardrail=violation.guardrail,
                reason=violation.reason,
            )
        if report.violations and not experiment.config.report_only:
            await self._stop(experiment, report.violations)
        self._reported |= {(experiment.target, violation.arm, violation.guardrail) for violation in new}

    async def _keep(self, experiment: Running, report: pb.ExperimentReport) -> None:
        points = await self.points(experiment)
        now = report.report_time.ToNanoseconds() * 1e-9
        if is_due(points, experiment.config.started_at or now, now):
            point = pb.ReportPoint(look_time=report.report_time, comparisons=deciding(report.comparisons))
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
    last = points[-1].look_time.ToNanoseconds() * 1e-9
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
