"""Writes into an experiment that a guardrail stops arms."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood.admin.v1 import tenants_pb2
from draftwood_tenants.catalog import Catalog, write_of
from draftwood_tenants.experiments.arm_assignment import Running
from draftwood_tenants.resources.base import STOPS, ConflictError, Write
from draftwood_tenants.resources.follower import ResourceFollower

_audit = structlog.get_logger("draftwood.audit")
_TRIES = 8


async def stop_arms(
    stored: ResourceFollower, catalog: Catalog, experiment: Running, found: Iterable[pb.StoppedArm]
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
        digests = [one.digest for one in catalog.experiments() if one.name == name]
        if current is None or current.state != pb.EXPERIMENT_STATE_RUNNING or digests != [digest]:
            return
        changed = pb.Experiment()
        changed.CopyFrom(current)
        new = _stop(changed, found)
        if not new:
            return
        try:
            await stored.write([_write(catalog, name, digest, changed)])
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


def _write(catalog: Catalog, name: str, digest: str, changed: pb.Experiment) -> Write:
    if changed.origin != tenants_pb2.RESOURCE_ORIGIN_FILE:
        return write_of(changed)
    stop = pb.Experiment(salt=digest, stopped_arms=changed.stopped_arms)
    if changed.state == pb.EXPERIMENT_STATE_STOPPED:
        stop.state = changed.state
        stop.end_time.CopyFrom(changed.end_time)
    return Write(STOPS, name, stop.SerializeToString(), catalog.stops_revision(name))


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
