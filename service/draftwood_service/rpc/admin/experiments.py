"""ExperimentService. What its states allow is in `draftwood_tenants.experiments.definition`."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as SequenceOf

import structlog
from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood.admin.v1 import tenants_pb2
from draftwood_memory.errors import MemoryStoreError
from draftwood_memory.memory import MemoryOperation
from draftwood_memory.operations import AdoptArm, PurgeArms
from draftwood_model_runner.errors import EngineStoppedError
from draftwood_service.experiments.live import LiveExperiments
from draftwood_service.rpc.admin.conclusion import tenant_writes
from draftwood_service.rpc.admin.messages import apply_mask, change_audited, page_of, require_etag
from draftwood_service.rpc.calls import Call
from draftwood_tenants.catalog import Catalog, write_of
from draftwood_tenants.experiments.assignment import ExperimentError
from draftwood_tenants.experiments.definition import (
    ExperimentConfig,
    ExperimentState,
    StateError,
    require_id,
    require_no_overlap,
    require_state,
    require_update,
)
from draftwood_tenants.experiments.placement import label_of
from draftwood_tenants.experiments.reading import PREFIX, experiment_of, invalid, read_experiment
from draftwood_tenants.reading import ServerLimits, under
from draftwood_tenants.resources.base import EXPERIMENTS, ConflictError, Write
from draftwood_tenants.resources.errors import (
    EtagError,
    NotAllowedNowError,
    OfFileError,
    ResourceExistsError,
    ResourceMissingError,
)
from draftwood_tenants.resources.follower import ResourceFollower

_log = structlog.get_logger(__name__)

_SALT_BYTES = 16
_TRIES = 8
_OUTPUT_ONLY = frozenset({"state", "start_time", "end_time", "salt", "winner", "stopped_arms"})


Memories = Callable[[MemoryOperation[int]], Awaitable[int]]
"""Runs an operation where the memories are."""


class ExperimentServicer:
    """The methods of ExperimentService, for `calls.handlers`."""

    def __init__(
        self,
        stored: ResourceFollower,
        catalog: Catalog,
        limits: ServerLimits,
        live: LiveExperiments,
        memories: Memories,
    ) -> None:
        self._stored = stored
        self._live = live
        self._memories = memories
        self._catalog = catalog
        self._limits = limits

    async def get_experiment(self, request: pb.GetExperimentRequest, call: Call) -> pb.Experiment:
        return await self._current(experiment_of("name", request.name))

    async def list_experiments(self, request: pb.ListExperimentsRequest, call: Call) -> pb.ListExperimentsResponse:
        await self._stored.refresh()
        page, following = page_of(self._catalog.names(EXPERIMENTS), request.page_size, request.page_token)
        found = filter(None, map(self._catalog.experiment_message, page))
        return pb.ListExperimentsResponse(experiments=found, next_page_token=following)

    async def create_experiment(self, request: pb.CreateExperimentRequest, call: Call) -> pb.Experiment:
        name = request.experiment_id
        with change_audited("create", PREFIX + name, call):
            try:
                require_id("experiment_id", name)
            except ExperimentError as error:
                raise invalid(error) from None
            await self._stored.refresh()
            if self._catalog.experiment_message(name) is not None:
                raise ResourceExistsError(PREFIX + name)
            made = pb.Experiment(
                name=PREFIX + name,
                origin=tenants_pb2.RESOURCE_ORIGIN_API,
                state=pb.EXPERIMENT_STATE_DRAFT,
                salt=secrets.token_hex(_SALT_BYTES),
            )
            apply_mask(made, request.experiment, FieldMask(), _OUTPUT_ONLY)
            made.create_time.GetCurrentTime()
            self._read(made, "experiment")
            try:
                return await self._put(made, request.validate_only)
            except ConflictError:
                raise ResourceExistsError(PREFIX + name) from None

    async def update_experiment(self, request: pb.UpdateExperimentRequest, call: Call) -> pb.Experiment:
        given = request.experiment
        name = experiment_of("experiment.name", given.name)

        def change(experiment: pb.Experiment) -> None:
            former = self._read(experiment)
            apply_mask(experiment, given, request.update_mask, _OUTPUT_ONLY)
            require_update(former, self._read(experiment, "experiment"))

        with change_audited("update", given.name, call):
            return await self._change(name, given.etag, request.validate_only, change)

    async def delete_experiment(self, request: pb.DeleteExperimentRequest, call: Call) -> Empty:
        name = experiment_of("name", request.name)
        with change_audited("delete", request.name, call):
            try:
                current = await self._changeable(name, request.etag)
            except ResourceMissingError:
                if request.allow_missing:
                    return Empty()
                raise
            if current.state == pb.EXPERIMENT_STATE_RUNNING:
                raise NotAllowedNowError(request.name, "STATE", "is running; stop it first")
            if not request.validate_only:
                if current.winner:  # what its last requests wrote after the conclusion
                    await self._memories(AdoptArm(label_of(name, current.winner)))
                await self._memories(PurgeArms(tuple(label_of(name, arm.id) for arm in current.arms)))
                try:
                    await self._stored.write([Write(EXPERIMENTS, name, None, int(current.etag, 16))])
                except ConflictError:
                    raise EtagError(request.name) from None
                await self._live.delete(self._read(current))
            return Empty()

    async def start_experiment(self, request: pb.StartExperimentRequest, call: Call) -> pb.Experiment:
        def change(experiment: pb.Experiment) -> None:
            config = self._read(experiment)
            require_state(config, "started", ExperimentState.DRAFT)
            require_no_overlap(config, self._catalog.experiments())
            experiment.state = pb.EXPERIMENT_STATE_RUNNING
            experiment.start_time.GetCurrentTime()

        with change_audited("start", request.name, call):
            name = experiment_of("name", request.name)
            return await self._change(name, request.etag, request.validate_only, change, alone=True)

    async def stop_experiment(self, request: pb.StopExperimentRequest, call: Call) -> pb.Experiment:
        def change(experiment: pb.Experiment) -> None:
            require_state(self._read(experiment), "stopped", ExperimentState.RUNNING)
            experiment.state = pb.EXPERIMENT_STATE_STOPPED
            experiment.end_time.GetCurrentTime()

        with change_audited("stop", request.name, call):
            name = experiment_of("name", request.name)
            return await self._change(name, request.etag, request.validate_only, change)

    async def conclude_experiment(self, request: pb.ConcludeExperimentRequest, call: Call) -> pb.Experiment:
        writes: list[Write] = []
        winner = request.winner

        def change(experiment: pb.Experiment) -> None:
            config = self._read(experiment)
            require_state(config, "concluded", ExperimentState.RUNNING, ExperimentState.STOPPED)
            writes[:] = tenant_writes(experiment, winner, request.keep_tenants, self._catalog)
            if config.state is ExperimentState.RUNNING:
                experiment.end_time.GetCurrentTime()
            experiment.state, experiment.winner = pb.EXPERIMENT_STATE_CONCLUDED, winner

        with change_audited("conclude", request.name, call):
            name = experiment_of("name", request.name)
            winner = request.winner or await self._better_arm(name)
            allowed = await self._change(name, request.etag, True, change, alone=True)
            if request.validate_only:
                return allowed
            # First the memory, so that the tenants' next requests draft from what the experiment's have written. What
            # those write that still run is added after it, and when the experiment is deleted.
            adopt = AdoptArm(label_of(name, winner))
            await self._memories(adopt)
            concluded = await self._change(name, request.etag, False, change, alone=True, writes=writes)
            try:
                await self._memories(adopt)
            except (MemoryStoreError, EngineStoppedError) as error:
                _log.warning("answers at the end of an experiment were not adopted", experiment=name, error=str(error))
            return concluded

    async def get_experiment_report(self, request: pb.GetExperimentReportRequest, call: Call) -> pb.ExperimentReport:
        current = await self._current(experiment_of("name", request.name))
        return await self._live.report(current, self._read(current))

    async def _better_arm(self, name: str) -> str:
        """The arm that the report says is better."""
        current = await self._current(name)
        winner = (await self._live.report(current, self._read(current))).better_arm
        if not winner:
            raise NotAllowedNowError(
                current.name, "STATE", "the report does not say which arm is better; name the winner (--winner ARM)"
            )
        return winner

    def _read(self, experiment: pb.Experiment, field: str = "") -> ExperimentConfig:
        """Raises InvalidValueError."""
        if not field:
            return read_experiment(experiment, self._limits)
        with under(field):
            return read_experiment(experiment, self._limits)

    async def _current(self, name: str) -> pb.Experiment:
        await self._stored.refresh()
        found = self._catalog.experiment_message(name)
        if found is None:
            raise ResourceMissingError(PREFIX + name)
        return found

    async def _changeable(self, name: str, etag: str) -> pb.Experiment:
        """Raises ResourceMissingError, OfFileError, EtagError."""
        current = await self._current(name)
        if current.origin == tenants_pb2.RESOURCE_ORIGIN_FILE:
            raise OfFileError(PREFIX + name)
        require_etag(PREFIX + name, etag, current.etag)
        return current

    async def _change(
        self,
        name: str,
        etag: str,
        validate_only: bool,
        change: Callable[[pb.Experiment], None],
        *,
        alone: bool = False,
        writes: SequenceOf[Write] = (),
    ) -> pb.Experiment:
        """Applies `change` to the stored experiment, again if it was changed meanwhile.

        Args:
            alone: nothing else in the store may change between what `change` sees and the write.
            writes: to be written with it.
        """
        for _ in range(_TRIES):
            current = await self._changeable(name, etag)
            revision = self._stored.revision
            changed = pb.Experiment()
            changed.CopyFrom(current)
            try:
                change(changed)
            except StateError as error:
                raise NotAllowedNowError(PREFIX + name, "STATE", str(error)) from None
            try:
                return await self._put(changed, validate_only, revision if alone else None, writes)
            except ConflictError:
                continue
        raise EtagError(PREFIX + name)

    async def _put(
        self, experiment: pb.Experiment, validate_only: bool, since: int | None = None, writes: SequenceOf[Write] = ()
    ) -> pb.Experiment:
        """Raises ConflictError."""
        write = write_of(experiment)
        if not validate_only:
            revision, *_ = await self._stored.write([write, *writes], since)
            experiment.etag = f"{revision:x}"
        return experiment
