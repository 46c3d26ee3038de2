"""The administrative services in memory: etags, masks, pages, `validate_only`, states, and errors as the server's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from draftwood.admin.v1 import experiments_pb2 as xp
from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood.admin.v1.experiments_pb2_grpc import ExperimentServiceServicer, add_ExperimentServiceServicer_to_server
from draftwood.admin.v1.tenants_pb2_grpc import TenantServiceServicer, add_TenantServiceServicer_to_server
from draftwood_errors import InvalidInputError
from draftwood_service.rpc.admin.resources import apply_mask
from tests.client.fake_server import Running, abort, reason, violation

CODE = grpc.StatusCode
OF_THE_SERVER = frozenset(
    {
        *("name", "etag", "create_time", "update_time", "origin"),
        *("state", "start_time", "end_time", "salt", "winner", "stopped_arms"),
    }
)


class FakeResources:
    """Resources of one kind.

    Attributes:
        held: by full name.
        before_write: called once before the next write that is no `validate_only`, as another caller's change.
        writes: (method, name, mask) of each.
    """

    def __init__(self, prefix: str, kind: type[Any]) -> None:
        self.prefix = prefix
        self.kind = kind
        self.held: dict[str, Any] = {}
        self.before_write: Callable[[], None] | None = None
        self.writes: list[tuple[str, str, list[str]]] = []
        self._revision = 0

    def page(self, size: int, token: str, most: int) -> tuple[list[Any], str]:
        names = sorted(name for name in self.held if name > token)
        page = names[: min(size or most, most)]
        return [self.held[name] for name in page], page[-1] if len(names) > len(page) else ""

    def found(self, name: str, context: Any) -> Any:
        if name not in self.held:
            fail(context, CODE.NOT_FOUND, f"{name}: does not exist", name)
        copy = self.kind()
        copy.CopyFrom(self.held[name])
        return copy

    def create(self, name: str, given: Any, validate_only: bool, context: Any) -> Any:
        if name in self.held:
            fail(context, CODE.ALREADY_EXISTS, f"{name}: exists already", name)
        made = self.kind(name=name)
        mask = masked(made, given, [], context)
        if self.kind is xp.Experiment:
            made.state, made.salt = xp.EXPERIMENT_STATE_DRAFT, "0a1b"
        made.create_time.GetCurrentTime()
        return self.put("create", made, mask, validate_only, context)

    def update(self, given: Any, paths: list[str], validate_only: bool, context: Any) -> Any:
        self.interfere(validate_only)
        current = self.changeable(given.name, given.etag, context)
        return self.put("update", current, masked(current, given, paths, context), validate_only, context)

    def changeable(self, name: str, etag: str, context: Any) -> Any:
        current = self.found(name, context)
        if current.origin == pb.RESOURCE_ORIGIN_FILE:
            fail(context, CODE.FAILED_PRECONDITION, f"{name}: is defined in the servers' tenants file", name, "FILE")
        if etag and etag != current.etag:
            fail(context, CODE.ABORTED, f"{name}: was changed by another call; read it again", name)
        return current

    def put(self, method: str, message: Any, mask: list[str], validate_only: bool, context: Any) -> Any:
        check(message, context)
        message.origin = message.origin or pb.RESOURCE_ORIGIN_API
        message.update_time.GetCurrentTime()
        if not validate_only:
            self._revision += 1
            message.etag = f"{self._revision:x}"
            self.held[message.name] = message
            self.writes.append((method, message.name, mask))
        return message

    def delete(self, request: Any, context: Any) -> Empty:
        if request.name not in self.held and request.allow_missing:
            return Empty()
        self.changeable(request.name, request.etag, context)
        if not request.validate_only:
            del self.held[request.name]
            self.writes.append(("delete", request.name, []))
        return Empty()

    def interfere(self, validate_only: bool) -> None:
        if self.before_write is not None and not validate_only:
            interfere, self.before_write = self.before_write, None
            interfere()


class FakeAdmin(Running, TenantServiceServicer, ExperimentServiceServicer):
    """A server on port 0.

    Attributes:
        reports: by the experiment's full name.
        page: the largest page.
        metadata: the headers of each GetTenant, ListTenants and CreateExperiment.
    """

    def __init__(self) -> None:
        self.tenants = FakeResources("tenants/", pb.Tenant)
        self.experiments = FakeResources("experiments/", xp.Experiment)
        self.reports: dict[str, xp.ExperimentReport] = {}
        self.page = 1000
        self.metadata: list[dict[str, Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        add_TenantServiceServicer_to_server(self, self._server)
        add_ExperimentServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def GetTenant(self, request: pb.GetTenantRequest, context: Any) -> pb.Tenant:
        self.metadata.append(dict(context.invocation_metadata()))
        tenant: pb.Tenant = self.tenants.found(request.name, context)
        return tenant

    def ListTenants(self, request: pb.ListTenantsRequest, context: Any) -> pb.ListTenantsResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        found, token = self.tenants.page(request.page_size, request.page_token, self.page)
        return pb.ListTenantsResponse(tenants=found, next_page_token=token)

    def CreateTenant(self, request: pb.CreateTenantRequest, context: Any) -> pb.Tenant:
        if request.tenant.name not in ("", f"tenants/{request.tenant_id}"):
            bad(context, "tenant.name", "must be empty or that of tenant_id")
        name = f"tenants/{request.tenant_id}"
        made: pb.Tenant = self.tenants.create(name, request.tenant, request.validate_only, context)
        return made

    def UpdateTenant(self, request: pb.UpdateTenantRequest, context: Any) -> pb.Tenant:
        paths = [*request.update_mask.paths]
        changed: pb.Tenant = self.tenants.update(request.tenant, paths, request.validate_only, context)
        return changed

    def DeleteTenant(self, request: pb.DeleteTenantRequest, context: Any) -> Empty:
        return self.tenants.delete(request, context)

    def GetExperiment(self, request: xp.GetExperimentRequest, context: Any) -> xp.Experiment:
        experiment: xp.Experiment = self.experiments.found(request.name, context)
        return experiment

    def ListExperiments(self, request: xp.ListExperimentsRequest, context: Any) -> xp.ListExperimentsResponse:
        found, token = self.experiments.page(request.page_size, request.page_token, self.page)
        return xp.ListExperimentsResponse(experiments=found, next_page_token=token)

    def CreateExperiment(self, request: xp.CreateExperimentRequest, context: Any) -> xp.Experiment:
        self.metadata.append(dict(context.invocation_metadata()))
        name = f"experiments/{request.experiment_id}"
        made: xp.Experiment = self.experiments.create(name, request.experiment, request.validate_only, context)
        return made

    def UpdateExperiment(self, request: xp.UpdateExperimentRequest, context: Any) -> xp.Experiment:
        paths = [*request.update_mask.paths]
        changed: xp.Experiment = self.experiments.update(request.experiment, paths, request.validate_only, context)
        return changed

    def DeleteExperiment(self, request: xp.DeleteExperimentRequest, context: Any) -> Empty:
        return self.experiments.delete(request, context)

    def StartExperiment(self, request: xp.StartExperimentRequest, context: Any) -> xp.Experiment:
        return self._move(request, xp.EXPERIMENT_STATE_RUNNING, [xp.EXPERIMENT_STATE_DRAFT], context)

    def StopExperiment(self, request: xp.StopExperimentRequest, context: Any) -> xp.Experiment:
        return self._move(request, xp.EXPERIMENT_STATE_STOPPED, [xp.EXPERIMENT_STATE_RUNNING], context)

    def ConcludeExperiment(self, request: xp.ConcludeExperimentRequest, context: Any) -> xp.Experiment:
        experiment = self.experiments.found(request.name, context)
        if not request.winner:
            fail(context, CODE.FAILED_PRECONDITION, f"{request.name}: no arm is better", request.name, "STATE")
        if not experiment.tenants and not request.keep_tenants:
            fail(context, CODE.FAILED_PRECONDITION, f"{request.name}: is for all tenants", request.name, "TENANTS")
        allowed = [xp.EXPERIMENT_STATE_RUNNING, xp.EXPERIMENT_STATE_STOPPED]
        return self._move(request, xp.EXPERIMENT_STATE_CONCLUDED, allowed, context, request.winner)

    def GetExperimentReport(self, request: xp.GetExperimentReportRequest, context: Any) -> xp.ExperimentReport:
        self.experiments.found(request.name, context)
        return self.reports[request.name]

    def _move(self, request: Any, state: Any, allowed: list[Any], context: Any, winner: str = "") -> xp.Experiment:
        experiment: xp.Experiment = self.experiments.changeable(request.name, request.etag, context)
        if experiment.state not in allowed:
            fail(context, CODE.FAILED_PRECONDITION, f"{request.name}: state: not allowed", request.name, "STATE")
        experiment.state, experiment.winner = state, winner
        (experiment.start_time if state == xp.EXPERIMENT_STATE_RUNNING else experiment.end_time).GetCurrentTime()
        moved: xp.Experiment = self.experiments.put("move", experiment, [], request.validate_only, context)
        return moved


def check(message: Any, context: Any) -> None:
    """A few of the server's rules."""
    if isinstance(message, pb.Tenant):
        if message.HasField("weight") and not 0.01 <= message.weight <= 100:
            bad(context, "tenant.weight", f"{message.weight:g} is not allowed; it must lie in [0.01, 100]")
        if message.drafting.strategy not in ("", "trie", "hybrid"):
            bad(context, "tenant.drafting.strategy", f"{message.drafting.strategy} is not allowed")
    elif not 2 <= len(message.arms) <= 8:
        bad(context, "experiment.arms", f"{len(message.arms)} of them; 2 to 8 are needed")


def masked(current: Any, given: Any, paths: list[str], context: Any) -> list[str]:
    """Copies the fields of a mask as the server does, those that are set if it is empty. Their paths."""
    mask = paths or [field.name for field, _ in given.ListFields() if field.name not in OF_THE_SERVER]
    try:
        apply_mask(current, given, FieldMask(paths=mask), OF_THE_SERVER)
    except InvalidInputError as error:
        bad(context, "update_mask", str(error))
    return mask


def bad(context: Any, field: str, problem: str) -> None:
    text = f"{field}: {problem}"
    abort(context, CODE.INVALID_ARGUMENT, text, reason("INVALID_VALUE"), violation(field, text), pushback=None)


def fail(context: Any, code: grpc.StatusCode, text: str, name: str, kind: str = "") -> None:
    details: list[Message] = [
        reason("ETAG_MISMATCH" if code is CODE.ABORTED else code.name, request_id="r-1"),
        error_details_pb2.ResourceInfo(resource_name=name, description=text),
    ]
    if kind:
        one = error_details_pb2.PreconditionFailure.Violation(type=kind, subject=name, description=text)
        details.append(error_details_pb2.PreconditionFailure(violations=[one]))
    abort(context, code, text, *details, pushback=None)
