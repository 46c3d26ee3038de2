"""The counts of tenants in a Redis or Valkey server, as one replica reads and changes them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftwood_memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_memory.store.naming import Naming
from draftwood_memory.store.redis_client import RedisClient, Script
from draftwood_service.quotas import scripts
from draftwood_service.quotas.limits import BUCKETS, LEASE_RETRY_SECONDS, QuotaExceededError
from draftwood_service.quotas.window import Bucket
from draftwood_tenants.rate_limits import RateLimits

REFRESH_SECONDS = 1.0
"""Interval of refreshes of leases, and of retries for a store that does not answer; also the timeout of each call."""
LEASE_SECONDS = 3.0
"""After which the leases of a replica that was killed expire: a refresh may be lost or late."""
_LEASE_MS = round(1000 * LEASE_SECONDS)
_CALLS = 8
"""At once to the store: the client has so many connections."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """What a refresh sends to the store about a tenant.

    Attributes:
        leases: of requests that have not ended, which are renewed.
        number: of the counts below; the store adds each number once.
        counts: what it does not count yet, by the age of the second in which it was admitted.
    """

    tenant: str
    leases: frozenset[int]
    number: int = 0
    counts: Mapping[int, Bucket] = field(default_factory=dict)


class Release(NamedTuple):
    """What the store is told about a request that has ended.

    Attributes:
        second: in which it was admitted, by the store's clock.
        unused, unused_requests: tokens that it did not use; requests that do not count.
    """

    tenant: str
    lease: int
    second: int = 0
    unused: int = 0
    unused_requests: int = 0


class QuotaStore:
    """Calls of one replica. All of them raise `MemoryStoreError` if there is no answer in time, or a refusal.

    Args:
        secret: hides tenants' names in the store.
    """

    def __init__(self, client: RedisClient, secret: bytes | None) -> None:
        self._client = client
        self._secret = secret
        self._replica = uuid.uuid4().hex[:12]
        self._calls = asyncio.Semaphore(_CALLS)

    async def connect(self) -> None:
        """Asks whether the store answers."""
        await self._within(self._client.command("PING"))

    async def reserve(self, tenant: str, limits: RateLimits, tokens: int, lease: int, requests: int = 1) -> int:
        """The second, by the store's clock, in which the request was admitted. Raises QuotaExceededError."""
        most = [limits.requests_per_minute or 0, limits.tokens_per_minute or 0, limits.concurrency or 0]
        arguments: list[int | str] = [BUCKETS, *most, tokens, _LEASE_MS, self._member(lease), requests]
        script = Script(scripts.RESERVE, self._keys(tenant), arguments)
        name, *rest = await self._within(self._client.run(script))
        if name == b"ok":
            return int(rest[0])
        limit, used, milliseconds = name.decode(), int(rest[0]), int(rest[1])
        retry = LEASE_RETRY_SECONDS if limit == "concurrency" else milliseconds / 1000
        needed = tokens if limit == "tokens_per_minute" else 1
        raise QuotaExceededError(limit, getattr(limits, limit), used, needed, retry)

    async def release(self, ended: Iterable[Release]) -> None:
        """Releases the leases of requests that have ended, and what they did not use."""
        made = [self._release_script(one) for one in ended]
        await self._within(self._client.run_all(made))

    async def refresh(self, refreshes: SequenceOf[Refresh]) -> list[MemoryStoreError | None]:
        """For each refresh its error, or None."""
        made = [self._refresh_script(one) for one in refreshes]
        answers = await self._within(self._client.run_all(made))
        return [one if isinstance(one, MemoryStoreError) else None for one in answers]

    async def close(self) -> None:
        await self._client.close()

    async def _within(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            async with asyncio.timeout(REFRESH_SECONDS), self._calls:
                return await call
        except TimeoutError:
            raise StoreUnavailableError(f"no answer within {REFRESH_SECONDS:g} s") from None
        finally:
            call.close()  # without the semaphore in time, it was never awaited

    def _release_script(self, one: Release) -> Script:
        arguments: list[int | str] = [one.second, one.unused, self._member(one.lease), one.unused_requests]
        return Script(scripts.RELEASE, self._keys(one.tenant), arguments)

    def _refresh_script(self, one: Refresh) -> Script:
        keys = self._keys(one.tenant)
        members = [self._member(lease) for lease in one.leases]
        arguments: list[int | str] = [BUCKETS, _LEASE_MS, one.number, len(members), *members]
        for age, bucket in one.counts.items():
            arguments += [age, bucket.requests, bucket.tokens]
        return Script(scripts.REFRESH, [*keys, f"{keys[0].rpartition(':')[0]}:sent:{self._replica}"], arguments)

    def _keys(self, tenant: str) -> list[str]:
        tag = f"quota:{Naming('', self._secret).part(tenant)}"
        return [f"dw:{{{tag}}}:used", f"dw:{{{tag}}}:places"]

    def _member(self, lease: int) -> str:
        return f"{self._replica}:{lease}"
