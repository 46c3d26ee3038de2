"""Limits over all replicas of a store; in each replica while the store does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf
from functools import partial

import structlog

from draftwood_memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_memory.settings import store_client, store_keys
from draftwood_memory.store.redis_client import RedisClient
from draftwood_service.quotas.local import BUCKETS, Bucket, Limiter, QuotaExceededError, Reservation, Window
from draftwood_service.quotas.store import REFRESH_SECONDS, QuotaStore, Refresh, Release
from draftwood_service.settings.groups import StoreSettings
from draftwood_tenants.config import RateLimits
from draftwood_tenants.resources.follower import end

_log = structlog.get_logger(__name__)

ANSWER_SECONDS = 0.1
"""How long a request waits for the store. An answer takes less than a millisecond on a local network."""
_FIRST_SECONDS = 0.1
"""Retry interval for a store that has never answered: below the polling interval of tenants, so that the store counts
limits as soon as requests are served."""
_TENANTS = 200
"""Tenants in one call of a refresh, which takes a few milliseconds."""


class SharedLimiter(Limiter):
    """Counts in the store; within this process while the store does not count.

    A call that fails concerns its tenant alone, until the next refresh; all tenants only if the store does not answer
    a refresh. Every admission is counted in this process too, so that this replica can hold the whole limit then: no
    request is refused that the store would admit, and each replica admits the limit at most. What was admitted and
    released meanwhile is sent to the store once it answers again.

    Attributes:
        outages: how often the store ceased to count, for all or some tenants.
        admitted_alone: requests that were admitted by this replica's counts alone.

    Args:
        secret: hides tenants' names in the store.
        answer_seconds: how long a request waits for the store.
    """

    def __init__(
        self, client: RedisClient, secret: bytes | None = None, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        super().__init__()
        self._store = QuotaStore(client, secret)
        self._answer_seconds = answer_seconds
        self._connected = False
        self._unreachable = False
        self._alone: set[str] = set()
        """Tenants whose last call failed."""
        self._unsent: dict[str, Window] = {}
        self._batches: dict[str, tuple[int, dict[int, Bucket]]] = {}
        """Counts that were sent, until the store has confirmed them, with their numbers."""
        self._number = 0
        self._owed: list[Release] = []
        """Of requests that the store counts and that ended while it did not answer."""
        self._releasing: set[asyncio.Task[None]] = set()
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def degraded(self) -> bool:
        """Whether the store does not count now, for all or some tenants."""
        return self._unreachable or bool(self._alone)

    def start(self) -> None:
        """See `Limiter`. Connects to the store as well."""
        self._refreshing = asyncio.create_task(self._refresh_always())

    async def reserve(self, tenant: str, limits: RateLimits, tokens: int, requests: int = 1) -> Reservation:
        """See `Limiter`. Waits `answer_seconds` for the store at most."""
        if not limits.any:
            return Reservation(Window(), 0, 0, 0)
        lease, counting = next(self._leases), None
        if not self._is_alone(tenant):
            counting = asyncio.create_task(self._store.reserve(tenant, limits, tokens, lease, requests))
        try:
            if counting is None or not await self._counted(counting, tenant):
                self.window_of(tenant).check(limits, tokens, self.clock(), requests)
                self.admitted_alone += requests
                if counting is None or counting.done():
                    counting = None
                    self._unsent.setdefault(tenant, Window()).add(tokens, self.clock(), requests)
        except (QuotaExceededError, asyncio.CancelledError):
            if counting is not None and not (counting.done() and counting.exception()):
                self._release(tenant, lease, 0, counting, tokens, requests)
            raise
        admitted = self.admit(tenant, limits, tokens, lease, requests)
        admitted.on_release = partial(self._release, tenant, lease, admitted.second, counting)
        return admitted

    async def _counted(self, counting: asyncio.Task[int], tenant: str) -> bool:
        """Whether the store says in time that it has counted a request. Raises QuotaExceededError.

        A late answer still counts: whether the request runs or has ended, its release waits for it.
        """
        await asyncio.wait([counting], timeout=self._answer_seconds)
        try:
            if counting.done():
                return bool(await counting)
            raise StoreUnavailableError(f"no answer within {self._answer_seconds:g} s")
        except MemoryStoreError as error:
            self._fail(error, tenant)
            return False

    async def close(self) -> None:
        """See `Limiter`. Waits shortly for reservations that are being released."""
        await end([self._refreshing])
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=self._answer_seconds)
        await self._store.close()

    async def refresh(self) -> None:
        """Renews the leases of this replica and its requests, and sends what the store does not count yet.

        Raises:
            MemoryStoreError: the store does not answer, or refuses.
        """
        await self._store.connect()
        self._connected = True
        owed = tuple(self._owed)
        await self._store.release(owed)
        del self._owed[: len(owed)]  # others may have ended meanwhile
        leases = {name: frozenset(window.leases) for name, window in self.windows.items() if window.leases}
        now = self.clock()
        for tenant, window in tuple(self._unsent.items()):
            if tenant not in self._batches:
                self._number += 1
                self._batches[tenant] = (self._number, self._unsent.pop(tenant).buckets)
            else:
                window.forget(now)
        tenants = [*{**leases, **self._batches, **dict.fromkeys(self._alone)}]
        refreshes = [self._refresh_of(name, leases.get(name, frozenset()), int(now)) for name in tenants]
        for first in range(0, len(refreshes), _TENANTS):
            await self._refresh_some(refreshes[first : first + _TENANTS])
        self._unreachable = False

    def _release(
        self,
        tenant: str,
        lease: int,
        here: int,
        counting: asyncio.Task[int] | None,
        unused: int,
        unused_requests: int,
    ) -> asyncio.Task[None] | None:
        """Tells the store that a request has ended, beside the caller.

        Args:
            here: second in which this process admitted it.
            counting: by the store; None if this replica admitted it alone.
        """
        if counting is None and (window := self._unsent.get(tenant)):
            window.refund(here, unused, unused_requests)
        work = self._release_in_store(tenant, lease, counting, unused, unused_requests)
        try:
            task = asyncio.get_running_loop().create_task(work)
        except RuntimeError:  # the loop has ended
            work.close()
            return None
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        waits = not self._is_alone(tenant) and (counting is None or counting.done())
        return task if waits else None

    async def _release_in_store(
        self, tenant: str, lease: int, counting: asyncio.Task[int] | None, unused: int, unused_requests: int
    ) -> None:
        ended = Release(tenant, lease)
        try:
            if counting is not None:
                ended = Release(tenant, lease, await counting, unused, unused_requests)
            if not self._is_alone(tenant):
                await self._store.release([ended])
                return
        except QuotaExceededError:  # it was not counted
            return
        except MemoryStoreError as error:  # a lease expires by itself
            self._fail(error, tenant)
        if ended.second:
            self._owed.append(ended)

    async def _refresh_always(self) -> None:
        was_degraded = False
        while True:
            try:
                await self.refresh()
            except MemoryStoreError as error:
                self._fail(error)
            except Exception as error:
                _log.exception("limits cannot be refreshed")
                self._fail(error)
            if was_degraded and not self.degraded:
                _log.info("limits hold over all replicas again", admitted_alone=self.admitted_alone)
            was_degraded = self.degraded
            await asyncio.sleep(REFRESH_SECONDS if self._connected else _FIRST_SECONDS)

    async def _refresh_some(self, refreshes: SequenceOf[Refresh]) -> None:
        """One that fails leaves the others as they are."""
        ended: list[Release] = []
        for refresh, error in zip(refreshes, await self._store.refresh(refreshes), strict=True):
            if error is not None:
                self._fail(error, refresh.tenant)
                continue
            self._alone.discard(refresh.tenant)
            self._batches.pop(refresh.tenant, None)
            ended += [
                Release(refresh.tenant, lease) for lease in refresh.leases - self.window_of(refresh.tenant).leases
            ]
        await self._store.release(ended)

    def _refresh_of(self, tenant: str, leases: frozenset[int], now: int) -> Refresh:
        number, buckets = self._batches.get(tenant, (0, {}))
        counts = {now - second: bucket for second, bucket in buckets.items() if now - second < BUCKETS}
        return Refresh(tenant, leases, number, counts)

    def _is_alone(self, tenant: str) -> bool:
        return self._unreachable or tenant in self._alone

    def _fail(self, error: Exception, tenant: str | None = None) -> None:
        """Goes on without the store, for a tenant, or None for all."""
        if not self.degraded:
            self.outages += 1
            _log.warning("the store does not count; each replica holds the whole limits", why=str(error))
        if tenant is None:
            self._unreachable = True
        else:
            self._alone.add(tenant)


def opened_limiter(settings: StoreSettings) -> Limiter:
    """A limiter that counts where the memories are stored, not started yet. Raises InvalidSettingError."""
    client, keys = store_client(settings.of_memory, REFRESH_SECONDS), store_keys(settings.of_memory)
    return Limiter() if client is None else SharedLimiter(client, None if keys is None else keys.naming_key)
