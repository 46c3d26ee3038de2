"""The administrative services in memory: etags, masks, pages, `validate_only`, states, and errors as the server's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2

from draftwood.admin.v1 import experiments_pb2 as xp
from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood_errors import InvalidInputError
from draftwood_service.rpc.tenants import apply_mask
from tests.client.fake_server import Running, abort, reason, violation

CODE = grpc.StatusCode
OF_THE_SERVER = frozenset({"name", "etag", "create_time", "update_time", "origin"}) | frozenset(
    {"state", "start_time", "end_time", "salt", "winner", "stopped_arms"}
)


class FakeResources:
    """Resources of one kind. Methods in camel case answer those of the service.

    Attributes:
        held: by full name.
        before_write: called once before the next write that is no `validate_only`, as another caller's change.
        writes: (method, name, mask) of each.
        page: the largest page.
    """

    def __init__(self, noun: str, messages: Any) -> None:
        self.noun = noun
        self.messages = messages
        self.kind = getattr(messages, noun.title())
        self.held: dict[str, Any] = {}
        self.before_write: Callable[[], None] | None = None
        self.writes: list[tuple[str, str, list[str]]] = []
        self.page = 1000
        self._revision = 0

    def Get(self, request: Any, context: Any) -> Any:
        if request.name not in self.held:
            fail(context, CODE.NOT_FOUND, f"{request.name}: does not exist", request.name)
        copy = self.kind()
        copy.CopyFrom(self.held[request.name])
        return copy

    def List(self, request: Any, context: Any) -> Any:
        names = sorted(name for name in self.held if name > request.page_token)
        page = names[: min(request.page_size or self.page, self.page)]
        response = getattr(self.messages, f"List{self.noun.title()}sResponse")()
        getattr(response, f"{self.noun}s").extend(self.held[name] for name in page)
        response.next_page_token = page[-1] if len(names) > len(page) else ""
        return response

    def Create(self, request: Any, context: Any) -> Any:
        name, given = f"{self.noun}s/{getattr(request, f'{self.noun}_id')}", getattr(request, self.noun)
        if name in self.held:
            fail(context, CODE.ALREADY_EXISTS, f"{name}: exists already", name)
        made = self.kind(name=name)
        mask = masked(made, given, [], context)
        if self.kind is xp.Experiment:
            made.state, made.salt = xp.EXPERIMENT_STATE_DRAFT, "0a1b"
        made.create_time.GetCurrentTime()
        return self.put("create", made, mask, request, context)

    def Update(self, request: Any, context: Any) -> Any:
        if self.before_write is not None and not request.validate_only:
            interfere, self.before_write = self.before_write, None
            interfere()
        given = getattr(request, self.noun)
        current = self.changeable(given, context)
        mask = masked(current, given, [*request.update_mask.paths], context)
        return self.put("update", current, mask, request, context)

    def Delete(self, request: Any, context: Any) -> Empty:
        if request.name not in self.held and request.allow_missing:
            return Empty()
        self.changeable(request, context)
        if not request.validate_only:
            del self.held[request.name]
            self.writes.append(("delete", request.name, []))
        return Empty()

    def changeable(self, given: Any, context: Any) -> Any:
        current, name = self.Get(given, context), given.name
        if current.origin == pb.RESOURCE_ORIGIN_FILE:
            fail(context, CODE.FAILED_PRECONDITION, f"{name}: is defined in the servers' tenants file", name, "FILE")
        if given.etag and given.etag != current.etag:
            fail(context, CODE.ABORTED, f"{name}: was changed by another call; read it again", name)
        return current

    def put(self, method: str, message: Any, mask: list[str], request: Any, context: Any) -> Any:
        check(message, context)
        message.origin = message.origin or pb.RESOURCE_ORIGIN_API
        message.update_time.GetCurrentTime()
        if not request.validate_only:
            self._revision += 1
            message.etag = f"{self._revision:x}"
            self.held[message.name] = message
            self.writes.append((method, message.name, mask))
        return message


class FakeExperiments(FakeResources):
    """With the states of experiments, and their reports by full name."""

    def __init__(self) -> None:
        super().__init__("experiment", xp)
        self.reports: dict[str, xp.ExperimentReport] = {}

    def Start(self, request: Any, context: Any) -> Any:
        return self._move(request, context, xp.EXPERIMENT_STATE_RUNNING, xp.EXPERIMENT_STATE_DRAFT)

    def Stop(self, request: Any, context: Any) -> Any:
        return self._move(request, context, xp.EXPERIMENT_STATE_STOPPED, xp.EXPERIMENT_STATE_RUNNING)

    def Conclude(self, request: Any, context: Any) -> Any:
        if not request.winner:
            fail(context, CODE.FAILED_PRECONDITION, f"{request.name}: no arm is better", request.name, "STATE")
        allowed = xp.EXPERIMENT_STATE_RUNNING, xp.EXPERIMENT_STATE_STOPPED
        return self._move(request, context, xp.EXPERIMENT_STATE_CONCLUDED, *allowed, winner=request.winner)

    def GetReport(self, request: Any, context: Any) -> Any:
        self.Get(request, context)
        return self.reports[request.name]

    def _move(self, request: Any, context: Any, state: Any, *allowed: Any, winner: str = "") -> Any:
        experiment = self.changeable(request, context)
        if experiment.state not in allowed:
            fail(context, CODE.FAILED_PRECONDITION, f"{request.name}: state: not allowed", request.name, "STATE")
        experiment.state, experiment.winner = state, winner
        (experiment.start_time if state == xp.EXPERIMENT_STATE_RUNNING else experiment.end_time).GetCurrentTime()
        return self.put("move", experiment, [], request, context)


class FakeAdmin(Running):
    """A server on port 0.

    Attributes:
        metadata: the headers of each call.
    """

    def __init__(self) -> None:
        self.tenants = FakeResources("tenant", pb)
        self.experiments = FakeExperiments()
        self.metadata: list[dict[str, Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        for resources in (self.tenants, self.experiments):
            noun = resources.noun.title()
            service = resources.messages.DESCRIPTOR.services_by_name[f"{noun}Service"]
            handlers = {method.name: self._handler(resources, method, noun) for method in service.methods}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def _handler(self, resources: FakeResources, method: Any, noun: str) -> Any:
        answer = getattr(resources, method.name.replace(f"{noun}s", "").replace(noun, ""))

        def handle(request: Any, context: Any) -> Any:
            self.metadata.append(dict(context.invocation_metadata()))
            return answer(request, context)

        read, write = (
            GetMessageClass(method.input_type).FromString,
            GetMessageClass(method.output_type).SerializeToString,
        )
        return grpc.unary_unary_rpc_method_handler(handle, read, write)


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
        violated = error_details_pb2.PreconditionFailure.Violation(type=kind, subject=name, description=text)
        details.append(error_details_pb2.PreconditionFailure(violations=[violated]))
    abort(context, code, text, *details, pushback=None)
