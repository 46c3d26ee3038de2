"""Limits over all replicas of a Redis or Valkey server, and limits of this replica alone while it does not answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

import structlog

from draftwood_memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_memory.store.naming import Naming
from draftwood_memory.store.redis_client import RedisClient, Script
from draftwood_service.quotas import scripts
from draftwood_service.quotas.limits import BUCKETS, PLACE_RETRY_SECONDS, Limiter, QuotaExceededError, RateLimits
from draftwood_service.quotas.local import Entry, Windows
from draftwood_service.quotas.window import Bucket, Window
from draftwood_service.resources.ending import end

_log = structlog.get_logger(__name__)

ANSWER_SECONDS = 0.1
"""How long a request waits for the store. Not tuned: an answer takes less than a millisecond on a local network."""
REFRESH_SECONDS = 1.0
"""Between two refreshes of leases, and between two looks at a store that does not answer."""
LEASE_SECONDS = 3.0
"""After which the places of a replica that was killed are free: a refresh may be lost or late."""
_CALLS = 8
"""At once to the store: the client has so many connections."""


class SharedLimiter(Limiter):
    """Counts in the store; within this process while the store does not answer.

    Every admission is counted in this process too, so that limits of this replica alone are ready when the store fails.
    What was admitted meanwhile is added to the store's counts once it answers again.

    Attributes:
        away: the store did not answer, and has not answered since.
        outages: how often that began.
        admitted_alone: requests that were admitted by the limits of this replica alone.

    Args:
        secret: hides tenants' names in the store.
        answer_seconds: how long a request waits for the store.
        clock: seconds of this process; does not go back.
    """

    def __init__(
        self,
        client: RedisClient,
        secret: bytes | None = None,
        answer_seconds: float = ANSWER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.away = False
        self.outages = 0
        self.admitted_alone = 0
        self._client = client
        self._secret = secret
        self._answer_seconds = answer_seconds
        self._connected = False
        self._replica = uuid.uuid4().hex[:12]
        self._windows = Windows(clock)
        self._unsent: dict[str, Window] = {}
        self._batches: dict[str, tuple[int, dict[int, Bucket]]] = {}
        """Counts that were sent, until the store has confirmed them, with their numbers."""
        self._number = 0
        self._calls = asyncio.Semaphore(_CALLS)
        self._settling: set[asyncio.Task[None]] = set()
        self._refreshing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """See `Limiter`. Connects to the store as well."""
        self._refreshing = asyncio.create_task(self._refresh_always())

    async def reserve(self, tenant: str, limits: RateLimits, tokens: int, requests: int = 1) -> Entry | _Reservation:
        """See `Limiter`. Waits `answer_seconds` for the store at most."""
        if not limits.any:
            return Entry(Window(), 0, 0, 0)
        place = self._windows.next_place()
        if not self.away:
            try:
                second = await self._reserve_in_store(tenant, limits, tokens, place, requests)
            except MemoryStoreError as error:
                self._fail(error)
            else:
                entry = self._windows.admit(tenant, limits, tokens, place, requests)
                return _Reservation(self, tenant, entry, second)
        self._windows.of(tenant).check(limits, tokens, self._windows.clock(), requests)
        self.admitted_alone += requests
        self._unsent.setdefault(tenant, Window()).add(tokens, self._windows.clock(), requests)
        return _Reservation(self, tenant, self._windows.admit(tenant, limits, tokens, place, requests), None)

    async def close(self) -> None:
        """See `Limiter`. Waits shortly for reservations that are being settled."""
        await end([self._refreshing])
        if self._settling:
            await asyncio.wait(self._settling, timeout=self._answer_seconds)
        await self._client.close()

    async def refresh(self) -> None:
        """Renews the leases of this replica's requests, and sends what the store does not count yet.

        Raises:
            MemoryStoreError: the store does not answer, or refuses.
        """
        places = {name: set(window.places) for name, window in self._windows.by_tenant.items() if window.places}
        for tenant, window in tuple(self._unsent.items()):
            if tenant not in self._batches:
                self._number += 1
                self._batches[tenant] = (self._number, self._unsent.pop(tenant).buckets)
            else:
                window.forget(self._windows.clock())
        tenants = [*{**places, **self._batches}]
        if not self._connected or (self.away and not tenants):  # connecting may take longer than a request waits
            await self._run(Script("return 1", [*self._keys("")], []), REFRESH_SECONDS)
        self._connected = True
        for tenant in tenants:
            await self._run(self._refresh_script(tenant, places.get(tenant, set())), REFRESH_SECONDS)
            self._batches.pop(tenant, None)
            for ended in places.get(tenant, set()) - self._windows.of(tenant).places:
                await self._run(self._settle_script(tenant, 0, 0, ended, 0), REFRESH_SECONDS)

    def settle(
        self, tenant: str, entry: Entry, second: int | None, unused: int, unused_requests: int = 0
    ) -> asyncio.Task[None] | None:
        """Tells the store that a request has ended, beside the caller.

        Args:
            second: in which the store admitted it; None if this replica did alone.
        """
        if second is None and (window := self._unsent.get(tenant)):
            window.give_back(entry.second, unused, unused_requests)
        if self.away:
            return None
        given_back = (unused, unused_requests) if second else (0, 0)
        work = self._settle_in_store(
            self._settle_script(tenant, second or 0, given_back[0], entry.place, given_back[1])
        )
        try:
            task = asyncio.get_running_loop().create_task(work)
        except RuntimeError:  # the loop has ended
            work.close()
            return None
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    async def _reserve_in_store(self, tenant: str, limits: RateLimits, tokens: int, place: int, requests: int) -> int:
        """The second, by the store's clock, in which the request was admitted.

        Raises:
            QuotaExceededError: it does not fit.
            MemoryStoreError: the store does not answer in time, or refuses.
        """
        most = [limits.requests_per_minute or 0, limits.tokens_per_minute or 0, limits.concurrency or 0]
        lease = round(1000 * LEASE_SECONDS)
        arguments: list[int | str] = [BUCKETS, *most, tokens, lease, self._member(place), requests]
        name, *rest = await self._run(Script(scripts.RESERVE, self._keys(tenant), arguments), self._answer_seconds)
        if name == b"ok":
            return int(rest[0])
        limit, used, milliseconds = name.decode(), int(rest[0]), int(rest[1])
        retry = PLACE_RETRY_SECONDS if limit == "concurrency" else milliseconds / 1000
        needed = tokens if limit == "tokens_per_minute" else 1
        raise QuotaExceededError(limit, getattr(limits, limit), used, needed, retry)

    async def _settle_in_store(self, script: Script) -> None:
        try:
            await self._run(script, self._answer_seconds)
        except MemoryStoreError as error:  # the tokens count until their minute is over, the place until its lease is
            self._fail(error)

    async def _refresh_always(self) -> None:
        while True:
            try:
                await self.refresh()
            except MemoryStoreError as error:
                self._fail(error)
            except Exception as error:
                _log.exception("limits cannot be refreshed")
                self._fail(error)
            else:
                if self.away:
                    _log.info("limits hold over all replicas again", admitted_alone=self.admitted_alone)
                self.away = False
            await asyncio.sleep(REFRESH_SECONDS)

    def _refresh_script(self, tenant: str, places: set[int]) -> Script:
        number, buckets = self._batches.get(tenant, (0, {}))
        now = int(self._windows.clock())
        rows = [(now - second, bucket) for second, bucket in buckets.items() if now - second < BUCKETS]
        members = [self._member(place) for place in places]
        arguments: list[int | str] = [BUCKETS, round(1000 * LEASE_SECONDS), number, len(members), *members]
        for age, bucket in rows:
            arguments += [age, bucket.requests, bucket.tokens]
        keys = self._keys(tenant)
        return Script(scripts.REFRESH, [*keys, f"{keys[0].rpartition(':')[0]}:sent:{self._replica}"], arguments)

    def _settle_script(self, tenant: str, second: int, unused: int, place: int, unused_requests: int) -> Script:
        return Script(scripts.SETTLE, self._keys(tenant), [second, unused, self._member(place), unused_requests])

    async def _run(self, script: Script, seconds: float) -> Any:
        """The script's result. Raises MemoryStoreError if there is none within `seconds`."""
        try:
            async with asyncio.timeout(seconds), self._calls:
                return await self._client.run(script)
        except TimeoutError:
            raise StoreUnavailableError(f"no answer within {seconds:g} s") from None

    def _fail(self, error: Exception) -> None:
        if not self.away:
            self.outages += 1
            _log.warning("the store does not count; limits hold within this replica alone", why=str(error))
        self.away = True

    def _keys(self, tenant: str) -> list[str]:
        tag = f"quota:{Naming('', self._secret).part(tenant)}"
        return [f"dw:{{{tag}}}:used", f"dw:{{{tag}}}:places"]

    def _member(self, place: int) -> str:
        return f"{self._replica}:{place}"


class _Reservation:
    """Of a `SharedLimiter`: an entry here, and one in the store unless the store was away."""

    def __init__(self, limiter: SharedLimiter, tenant: str, entry: Entry, second: int | None) -> None:
        self._limiter = limiter
        self._tenant = tenant
        self._entry = entry
        self._second = second
        self._settling: asyncio.Task[None] | None = None

    def settle(self, used_tokens: int, counts: bool = True) -> None:
        """See `Reservation`."""
        if self._entry.open:
            self._entry.settle(used_tokens, counts)
            unused = max(0, self._entry.tokens - used_tokens)
            requests = 0 if counts else self._entry.requests
            self._settling = self._limiter.settle(self._tenant, self._entry, self._second, unused, requests)

    async def settled(self) -> None:
        """See `Reservation`: the store has answered, or does not in time."""
        if self._settling is not None:
            await asyncio.shield(self._settling)
