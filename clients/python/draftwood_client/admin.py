"""The operators' clients: tenants, experiments, status and audit of servers, as messages of the protocol."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar, Generic, TypeVar, Unpack

from google.protobuf.field_mask_pb2 import FieldMask

from draftwood.admin.v1 import audit_pb2, experiments_pb2, status_pb2, tenants_pb2
from draftwood.admin.v1.audit_pb2_grpc import AuditServiceStub
from draftwood.admin.v1.experiments_pb2_grpc import ExperimentServiceStub
from draftwood.admin.v1.status_pb2_grpc import StatusServiceStub
from draftwood.admin.v1.tenants_pb2_grpc import TenantServiceStub
from draftwood_client.calls import (
    AsyncCalls,
    Awaiting,
    AwaitingClient,
    Blocking,
    BlockingClient,
    Call,
    Calls,
    streaming,
    unary,
)
from draftwood_client.connection import Connection, ConnectionArguments
from draftwood_client.options import CallOptions

_Resource = TypeVar("_Resource")


class _Resources(Generic[_Resource]):
    """Calls that tenants and experiments have alike. They are named as in requests, without "tenants/"."""

    _messages: ClassVar[Any]
    _noun: ClassVar[str]

    def __init__(self, calls: Any) -> None:
        self._calls = calls

    @unary
    def get(self, name: str, **call: Unpack[CallOptions]) -> Call[_Resource]:
        """Raises `NotFoundError`."""
        return self._call("Get{}", call, name=self._name(name))

    @streaming
    def list(self, *, page_size: int = 0, **call: Unpack[CallOptions]) -> Call[_Resource]:
        """All of them by name; pages are read during iteration."""
        request = getattr(self._messages, f"List{self._noun.title()}sRequest")(page_size=page_size)
        return Call(f"List{self._noun.title()}s", request, call, items=f"{self._noun}s")

    @unary
    def create(
        self, name: str, config: _Resource, *, validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Call[_Resource]:
        """Raises `AlreadyExistsError`; with `validate_only` nothing is changed."""
        fields: dict[str, Any] = {f"{self._noun}_id": name, self._noun: config, "validate_only": validate_only}
        return self._call("Create{}", call, **fields)

    @unary
    def update(
        self, config: _Resource, mask: Iterable[str] = (), *, validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Call[_Resource]:
        """Changes the resource that `config.name` names.

        Args:
            mask: fields to change, such as "drafting.strategy"; none for those that `config` sets, "*" for all.

        Raises:
            AbortedError: `config.etag` is set, and not the current one.
            NotFoundError, FailedPreconditionError: there is no such resource, its state does not allow the change, or
                it is in the servers' file.
        """
        return self._update(config, mask, call, validate_only=validate_only)

    @unary
    def delete(
        self,
        name: str,
        *,
        etag: str = "",
        allow_missing: bool = False,
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> Call[None]:
        """A tenant uses the settings of the servers again; counts and memories of an experiment are deleted too.

        Raises as `update`.
        """
        fields: dict[str, Any] = {"etag": etag, "allow_missing": allow_missing, "validate_only": validate_only}
        request = getattr(self._messages, f"Delete{self._noun.title()}Request")(name=self._name(name), **fields)
        return Call(f"Delete{self._noun.title()}", request, call, lambda _: None)

    def _update(self, config: _Resource, mask: Iterable[str], call: CallOptions, **fields: Any) -> Call[_Resource]:
        return self._call("Update{}", call, **{self._noun: config, "update_mask": FieldMask(paths=mask)}, **fields)

    def _call(self, method: str, call: CallOptions, **fields: Any) -> Call[_Resource]:
        method = method.format(self._noun.title())
        return Call(method, getattr(self._messages, f"{method}Request")(**fields), call)

    def _name(self, name: str) -> str:
        return f"{self._noun}s/{name}"


class _Tenants(_Resources[tenants_pb2.Tenant]):
    _messages: ClassVar[Any] = tenants_pb2
    _noun = "tenant"
    _stub_type = TenantServiceStub

    @unary
    def update(
        self,
        config: tenants_pb2.Tenant,
        mask: Iterable[str] = (),
        *,
        allow_missing: bool = False,
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> Call[tenants_pb2.Tenant]:
        """As of experiments; with `allow_missing`, creates the tenant if there is none."""
        return self._update(config, mask, call, allow_missing=allow_missing, validate_only=validate_only)


class _Experiments(_Resources[experiments_pb2.Experiment]):
    _messages: ClassVar[Any] = experiments_pb2
    _noun = "experiment"
    _stub_type = ExperimentServiceStub

    @unary
    def start(
        self, name: str, *, etag: str = "", validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Call[experiments_pb2.Experiment]:
        """Begins to assign requests. Raises as `update`."""
        return self._call("Start{}", call, name=self._name(name), etag=etag, validate_only=validate_only)

    @unary
    def stop(
        self, name: str, *, etag: str = "", validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Call[experiments_pb2.Experiment]:
        """Ends the assignment for good. Raises as `update`."""
        return self._call("Stop{}", call, name=self._name(name), etag=etag, validate_only=validate_only)

    @unary
    def conclude(
        self,
        name: str,
        winner: str = "",
        *,
        keep_tenants: bool = False,
        etag: str = "",
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> Call[experiments_pb2.Experiment]:
        """Stops it if it runs, and makes an arm's drafting that of the tenants in scope. Raises as `update`.

        Args:
            winner: the arm; "" for the one that the report says is better.
            keep_tenants: leave the tenants' configuration as it is.
        """
        fields: dict[str, Any] = {"etag": etag, "keep_tenants": keep_tenants, "validate_only": validate_only}
        return self._call("Conclude{}", call, name=self._name(name), winner=winner, **fields)

    @unary
    def report(self, name: str, **call: Unpack[CallOptions]) -> Call[experiments_pb2.ExperimentReport]:
        """What was counted so far, and what may be concluded from it."""
        request = experiments_pb2.GetExperimentReportRequest(name=self._name(name))
        return Call("GetExperimentReport", request, call)


class Tenants(_Tenants, Blocking):
    """`AdminClient.tenants`: the configuration of tenants. Every method raises `StatusError`."""


class AsyncTenants(_Tenants, Awaiting):
    """`AsyncAdminClient.tenants`. See `Tenants`."""


class Experiments(_Experiments, Blocking):
    """`AdminClient.experiments`: A/B tests of drafting strategies. Every method raises `StatusError`."""


class AsyncExperiments(_Experiments, Awaiting):
    """`AsyncAdminClient.experiments`. See `Experiments`."""


class _Servers:
    _stub_type = StatusServiceStub

    @unary
    def status(self, **call: Unpack[CallOptions]) -> Call[status_pb2.ServerStatus]:
        """What this server does now. Raises `StatusError`."""
        return Call("GetStatus", status_pb2.GetStatusRequest(), call, lambda response: response.status)

    @streaming
    def watch_status(self, interval: float = 1.0, **call: Unpack[CallOptions]) -> Call[status_pb2.ServerStatus]:
        """The status at once and each `interval` seconds, 0.5 to 60. Raises `StatusError`."""
        request = status_pb2.WatchStatusRequest(interval=timedelta(seconds=interval))
        return Call("WatchStatus", request, call, lambda response: response.status)

    @unary
    def audit_report(self, **call: Unpack[CallOptions]) -> Call[audit_pb2.GetAuditReportResponse]:
        """What the losslessness audit of this server found since its start. Raises `StatusError`."""
        return Call("GetAuditReport", audit_pb2.GetAuditReportRequest(), call, stub=AuditServiceStub)


class AdminClient(_Servers, BlockingClient):
    """A connection to a server's administrative services. Arguments as for `Client`; no call is retried.

        with AdminClient("localhost:50051", api_key=key) as admin:
            acme = admin.tenants.get("acme")
            acme.weight = 2.0
            admin.tenants.update(acme, ["weight"])
            print(admin.status().model)

    Every call takes `timeout` and `metadata`, as in `CallOptions`. Thread-safe.

    Attributes:
        tenants, experiments: the resources; see `Tenants` and `Experiments`.

    Raises:
        ArgumentError: an argument is invalid.
    """

    def __init__(self, target: str | None = None, **arguments: Unpack[ConnectionArguments]) -> None:
        self._calls = Calls(Connection.without_retries(target, arguments))
        self.tenants = Tenants(self._calls)
        self.experiments = Experiments(self._calls)


class AsyncAdminClient(_Servers, AwaitingClient):
    """`AdminClient` for asyncio. Belongs to the event loop of its first call."""

    def __init__(self, target: str | None = None, **arguments: Unpack[ConnectionArguments]) -> None:
        self._calls = AsyncCalls(Connection.without_retries(target, arguments))
        self.tenants = AsyncTenants(self._calls)
        self.experiments = AsyncExperiments(self._calls)
