"""Writes into an experiment that a guardrail stops arms."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood.admin.v1 import tenants_pb2
from draftwood_tenants.catalog import Catalog, write_of
from draftwood_tenants.experiments.placement import Running
from draftwood_tenants.resources.base import STOPS, ConflictError, Write
from draftwood_tenants.resources.follower import ResourceFollower

_audit = structlog.get_logger("draftwood.audit")
_TRIES = 8


class GuardrailStops:
    """Stops arms, and experiments of which no comparison is left."""

    def __init__(self, stored: ResourceFollower, catalog: Catalog) -> None:
        self._stored = stored
        self._catalog = catalog

    async def stop(self, experiment: Running, found: Iterable[pb.StoppedArm]) -> None:
        """Adds stopped arms to the experiment, unless it does not run any more or is another one by now.

        Raises:
            MemoryStoreError: it cannot be written.
        """
        name = experiment.config.name
        for _ in range(_TRIES):
            await self._stored.refresh()
            current = self._catalog.experiment_message(name)
            digests = [one.digest for one in self._catalog.experiments() if one.name == name]
            if current is None or current.state != pb.EXPERIMENT_STATE_RUNNING:
                return
            if digests != [experiment.config.digest]:
                return
            changed = pb.Experiment()
            changed.CopyFrom(current)
            new = _stop(changed, found)
            if not new:
                return
            try:
                await self._stored.write([self._write(experiment, changed)])
            except ConflictError:
                continue
            for one in new:
                _audit.info(
                    "resource",
                    action="stop_arm",
                    resource=f"experiments/{name}",
                    principal="guardrail",
                    arm=one.arm,
                    guardrail=one.guardrail,
                    reason=one.reason,
                    ended=changed.state == pb.EXPERIMENT_STATE_STOPPED,
                    result="ok",
                )
            return

    def _write(self, experiment: Running, changed: pb.Experiment) -> Write:
        name = experiment.config.name
        if changed.origin != tenants_pb2.RESOURCE_ORIGIN_FILE:
            return write_of(changed)
        stop = pb.Experiment(salt=experiment.config.digest, stopped_arms=changed.stopped_arms)
        if changed.state == pb.EXPERIMENT_STATE_STOPPED:
            stop.state = changed.state
            stop.end_time.CopyFrom(changed.end_time)
        return Write(STOPS, name, stop.SerializeToString(), self._catalog.stops_revision(name))


def _stop(experiment: pb.Experiment, found: Iterable[pb.StoppedArm]) -> list[pb.StoppedArm]:
    """Adds the first violation of each arm that runs, and stops the experiment if nothing is left to compare."""
    stopped = {one.arm for one in experiment.stopped_arms}
    new = []
    for one in found:
        if one.arm not in stopped:
            stopped.add(one.arm)
            new.append(one)
    experiment.stopped_arms.extend(new)
    control, *others = (arm.id for arm in experiment.arms)
    if control in stopped or stopped.issuperset(others):
        experiment.state = pb.EXPERIMENT_STATE_STOPPED
        experiment.end_time.GetCurrentTime()
    return new
