"""ExperimentService. What its states allow is in `draftwood_tenants.experiments.definition`."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

import structlog
from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood.admin.v1 import tenants_pb2
from draftwood_memory.errors import MemoryStoreError
from draftwood_memory.memory import MemoryOperation
from draftwood_memory.operations import AdoptArm, PurgeArms
from draftwood_model_runner.errors import EngineStoppedError, InvalidInputError
from draftwood_service.errors import MemoriesKeptError
from draftwood_service.experiments.live import LiveExperiments
from draftwood_service.rpc.calls import Call, Run
from draftwood_service.rpc.tenants import Resources, apply_mask, change_audited
from draftwood_tenants.catalog import Catalog, write_of
from draftwood_tenants.experiments.arms import label_of
from draftwood_tenants.experiments.assignment import ExperimentError
from draftwood_tenants.experiments.definition import (
    ExperimentConfig,
    ExperimentState,
    require_id,
    require_no_overlap,
    require_state,
    require_update,
)
from draftwood_tenants.reading import (
    EXPERIMENT_PREFIX,
    TENANT_PREFIX,
    ServerLimits,
    experiment_of,
    invalid,
    read_experiment,
    under,
)
from draftwood_tenants.resources.follower import ResourceFollower
from draftwood_tenants.resources.store import EXPERIMENTS, PreconditionError, Write

_log = structlog.get_logger(__name__)

_SALT_BYTES = 16
_OUTPUT_ONLY = frozenset({"state", "start_time", "end_time", "salt", "winner", "stopped_arms"})


Memories = Callable[[MemoryOperation[int]], Awaitable[int]]
"""Runs an operation where the memories are."""
_NAMED = 5
"""Tenants that an error names."""


class ExperimentServicer:
    """The methods of ExperimentService."""

    def __init__(
        self,
        stored: ResourceFollower,
        catalog: Catalog,
        limits: ServerLimits,
        live: LiveExperiments,
        memories: Memories,
    ) -> None:
        self._experiments = Resources(EXPERIMENTS, pb.Experiment, stored, catalog, catalog.experiment_message)
        self._live = live
        self._memories = memories
        self._catalog = catalog
        self._limits = limits

    @property
    def methods(self) -> dict[str, Run]:
        """What answers each method of the service."""
        return {
            "GetExperiment": self.get_experiment,
            "ListExperiments": self.list_experiments,
            "CreateExperiment": self.create_experiment,
            "UpdateExperiment": self.update_experiment,
            "DeleteExperiment": self.delete_experiment,
            "StartExperiment": self.start_experiment,
            "StopExperiment": self.stop_experiment,
            "ConcludeExperiment": self.conclude_experiment,
            "GetExperimentReport": self.get_experiment_report,
        }

    async def get_experiment(self, request: pb.GetExperimentRequest, call: Call) -> pb.Experiment:
        return await self._experiments.get(experiment_of("name", request.name))

    async def list_experiments(self, request: pb.ListExperimentsRequest, call: Call) -> pb.ListExperimentsResponse:
        page, following = await self._experiments.page(request.page_size, request.page_token)
        return pb.ListExperimentsResponse(experiments=page, next_page_token=following)

    async def create_experiment(self, request: pb.CreateExperimentRequest, call: Call) -> pb.Experiment:
        name = request.experiment_id

        def set_up(made: pb.Experiment) -> None:
            made.state = pb.EXPERIMENT_STATE_DRAFT
            made.salt = secrets.token_hex(_SALT_BYTES)
            apply_mask(made, request.experiment, FieldMask(), _OUTPUT_ONLY)
            self._read(made, "experiment")

        with change_audited("create", EXPERIMENT_PREFIX + name, call):
            try:
                require_id("experiment_id", name)
            except ExperimentError as error:
                raise invalid(error) from None
            return await self._experiments.create(name, set_up, request.validate_only)

    async def update_experiment(self, request: pb.UpdateExperimentRequest, call: Call) -> pb.Experiment:
        given = request.experiment
        name = experiment_of("experiment.name", given.name)

        def change(experiment: pb.Experiment) -> None:
            former = self._read(experiment)
            apply_mask(experiment, given, request.update_mask, _OUTPUT_ONLY)
            require_update(former, self._read(experiment, "experiment"))

        with change_audited("update", given.name, call):
            return await self._experiments.change(name, given.etag, request.validate_only, change)

    async def delete_experiment(self, request: pb.DeleteExperimentRequest, call: Call) -> Empty:
        name = experiment_of("name", request.name)
        with change_audited("delete", request.name, call):
            current = await self._experiments.changeable(name, request.etag, request.allow_missing)
            if current is not None and current.state == pb.EXPERIMENT_STATE_RUNNING:
                raise PreconditionError(request.name, "STATE", "is running; stop it first")
            if current is not None and not request.validate_only:
                if current.winner:  # what its last requests wrote after the conclusion
                    await self._memories(AdoptArm(label_of(name, current.winner)))
                await self._experiments.delete(current)  # refused if somebody has changed it: the memories stay then
                await self._live.delete(self._read(current))
                await self._purge_arms(name, current)
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
            return await self._experiments.change(name, request.etag, request.validate_only, change, alone=True)

    async def stop_experiment(self, request: pb.StopExperimentRequest, call: Call) -> pb.Experiment:
        def change(experiment: pb.Experiment) -> None:
            require_state(self._read(experiment), "stopped", ExperimentState.RUNNING)
            experiment.state = pb.EXPERIMENT_STATE_STOPPED
            experiment.end_time.GetCurrentTime()

        with change_audited("stop", request.name, call):
            name = experiment_of("name", request.name)
            return await self._experiments.change(name, request.etag, request.validate_only, change)

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
            allowed = await self._experiments.change(name, request.etag, True, change, alone=True)
            if request.validate_only:
                return allowed
            # First the memory, so that the tenants' next requests draft from what the experiment's have written. What
            # those write that still run is added after it, and when the experiment is deleted.
            adopt = AdoptArm(label_of(name, winner))
            await self._memories(adopt)
            concluded = await self._experiments.change(name, request.etag, False, change, alone=True, writes=writes)
            try:
                await self._memories(adopt)
            except (MemoryStoreError, EngineStoppedError) as error:
                _log.warning("answers at the end of an experiment were not adopted", experiment=name, error=str(error))
            return concluded

    async def get_experiment_report(self, request: pb.GetExperimentReportRequest, call: Call) -> pb.ExperimentReport:
        current = await self._experiments.get(experiment_of("name", request.name))
        return await self._live.report(current, self._read(current))

    async def _purge_arms(self, name: str, deleted: pb.Experiment) -> None:
        """Raises MemoriesKeptError."""
        try:
            await self._memories(PurgeArms(tuple(label_of(name, arm.id) for arm in deleted.arms)))
        except (MemoryStoreError, EngineStoppedError) as error:
            raise MemoriesKeptError(deleted.name, [arm.id for arm in deleted.arms], error) from error

    async def _better_arm(self, name: str) -> str:
        """The arm that the report says is better."""
        current = await self._experiments.get(name)
        winner = (await self._live.report(current, self._read(current))).better_arm
        if not winner:
            raise PreconditionError(
                current.name, "STATE", "the report does not say which arm is better; name the winner (--winner ARM)"
            )
        return winner

    def _read(self, experiment: pb.Experiment, field: str = "") -> ExperimentConfig:
        """Raises InvalidValueError."""
        if not field:
            return read_experiment(experiment, self._limits)
        with under(field):
            return read_experiment(experiment, self._limits)


def tenant_writes(experiment: pb.Experiment, winner: str, keep_tenants: bool, catalog: Catalog) -> list[Write]:
    """The writes that make the winner's drafting that of the tenants in scope.

    Raises:
        InvalidInputError: there is no such arm.
        PreconditionError: a tenant is of the file, or the experiment is for all tenants.
    """
    arm = next((arm for arm in experiment.arms if arm.id == winner), None)
    if arm is None:
        known = ", ".join(arm.id for arm in experiment.arms)
        raise InvalidInputError("winner", winner, f"there is no such arm; there are: {known}")
    if keep_tenants:
        return []
    if not experiment.tenants:
        problem = "is for all tenants: set the servers' default (--strategy), and conclude with keep_tenants"
        raise PreconditionError(experiment.name, "TENANTS", problem)
    of_file = [tenant for tenant in experiment.tenants if tenant in catalog.file.tenants]
    if of_file:
        named = ", ".join(sorted(of_file)[:_NAMED]) + (", ..." if len(of_file) > _NAMED else "")
        problem = f"the tenants file defines {named}: change them there, and conclude with keep_tenants"
        raise PreconditionError(experiment.name, "TENANTS", problem)
    return [_write(tenant, arm.drafting, catalog.tenant_message(tenant)) for tenant in sorted({*experiment.tenants})]


def _write(tenant: str, drafting: tenants_pb2.DraftConfig, current: tenants_pb2.Tenant | None) -> Write:
    changed = tenants_pb2.Tenant(name=TENANT_PREFIX + tenant, origin=tenants_pb2.RESOURCE_ORIGIN_API)
    changed.create_time.GetCurrentTime()
    if current is not None:
        changed.CopyFrom(current)
    changed.drafting.CopyFrom(drafting)
    return write_of(changed)
