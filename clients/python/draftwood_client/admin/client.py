"""The operators' client: tenants, experiments, status and audit of servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self, Unpack

from draftwood.admin.v1 import audit_pb2, status_pb2
from draftwood.admin.v1.audit_pb2_grpc import AuditServiceStub
from draftwood.admin.v1.status_pb2_grpc import StatusServiceStub
from draftwood_client.admin.audit import AuditReport
from draftwood_client.admin.calls import AsyncCalls, Calls
from draftwood_client.admin.experiments import AsyncExperiments, Experiments
from draftwood_client.admin.status import ServerStatus
from draftwood_client.admin.tenants import AsyncTenants, Tenants
from draftwood_client.connection import Connection, ConnectionArguments
from draftwood_client.options import CallOptions
from draftwood_client.protocol.convert import from_message


class AdminClient:
    """A connection to a server's administrative services. Arguments as for `Client`; no call is retried.

        with AdminClient("localhost:50051", api_key=key) as admin:
            acme = admin.tenants.get("acme")
            admin.tenants.update(dataclasses.replace(acme, weight=2.0), ["weight"])
            print(admin.status().state)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels calls under way and closes the connection. May be called twice."""
        self._calls.close()

    def audit_report(self, **call: Unpack[CallOptions]) -> AuditReport:
        """What the losslessness audit of this server found since its start. Raises `StatusError`."""
        stub = AuditServiceStub(self._calls.channel)
        return from_message(AuditReport, self._calls.ask(stub.GetAuditReport, audit_pb2.GetAuditReportRequest(), call))

    def status(self, **call: Unpack[CallOptions]) -> ServerStatus:
        """What this server does now. Raises `StatusError`."""
        stub = StatusServiceStub(self._calls.channel)
        return from_message(ServerStatus, self._calls.ask(stub.GetStatus, status_pb2.GetStatusRequest(), call).status)

    def watch_status(self, interval: float = 1.0, **call: Unpack[CallOptions]) -> Iterator[ServerStatus]:
        """The status at once and each `interval` seconds, 0.5 to 60. Raises `StatusError`."""
        stub = StatusServiceStub(self._calls.channel)
        for response in self._calls.stream(stub.WatchStatus, _watch(interval), call):
            yield from_message(ServerStatus, response.status)


class AsyncAdminClient:
    """`AdminClient` for asyncio. Belongs to the event loop of its first call."""

    def __init__(self, target: str | None = None, **arguments: Unpack[ConnectionArguments]) -> None:
        self._calls = AsyncCalls(Connection.without_retries(target, arguments))
        self.tenants = AsyncTenants(self._calls)
        self.experiments = AsyncExperiments(self._calls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels calls under way and closes the connection. May be called twice."""
        await self._calls.close()

    async def audit_report(self, **call: Unpack[CallOptions]) -> AuditReport:
        """See `AdminClient.audit_report`."""
        stub = AuditServiceStub(self._calls.channel)
        return from_message(
            AuditReport, await self._calls.ask(stub.GetAuditReport, audit_pb2.GetAuditReportRequest(), call)
        )

    async def status(self, **call: Unpack[CallOptions]) -> ServerStatus:
        """See `AdminClient.status`."""
        stub = StatusServiceStub(self._calls.channel)
        response = await self._calls.ask(stub.GetStatus, status_pb2.GetStatusRequest(), call)
        return from_message(ServerStatus, response.status)

    async def watch_status(self, interval: float = 1.0, **call: Unpack[CallOptions]) -> AsyncIterator[ServerStatus]:
        """See `AdminClient.watch_status`."""
        stub = StatusServiceStub(self._calls.channel)
        async for response in self._calls.stream(stub.WatchStatus, _watch(interval), call):
            yield from_message(ServerStatus, response.status)


def _watch(interval: float) -> status_pb2.WatchStatusRequest:
    return status_pb2.WatchStatusRequest(interval=timedelta(seconds=interval))
