"""The operators' client of tenants and experiments."""

from __future__ import annotations

from types import TracebackType
from typing import Self, Unpack

from draftwood_client.admin.calls import AsyncCalls, Calls, ConnectionArguments, connect
from draftwood_client.admin.experiments import AsyncExperiments, Experiments
from draftwood_client.admin.tenants import AsyncTenants, Tenants
from draftwood_client.connection import DEFAULT_TARGET


class AdminClient:
    """A connection to a server's administrative services. Arguments as for `Client`; no call is retried.

        with AdminClient("localhost:50051", api_key=key) as admin:
            acme = admin.tenants.get("acme")
            acme.weight = 2
            admin.tenants.update(acme, ["weight"])

    Thread-safe.

    Attributes:
        tenants, experiments: the resources; see `Tenants` and `Experiments`.

    Raises:
        ArgumentError: an argument is invalid.
    """

    def __init__(self, target: str = DEFAULT_TARGET, **arguments: Unpack[ConnectionArguments]) -> None:
        self._calls = Calls(connect(target, arguments))
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


class AsyncAdminClient:
    """`AdminClient` for asyncio. Belongs to the event loop of its first call."""

    def __init__(self, target: str = DEFAULT_TARGET, **arguments: Unpack[ConnectionArguments]) -> None:
        self._calls = AsyncCalls(connect(target, arguments))
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
