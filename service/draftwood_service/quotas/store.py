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
from draftwood_service.quotas.local import BUCKETS, LEASE_RETRY_SECONDS, Bucket, QuotaExceededError
from draftwood_tenants.config import RateLimits

REFRESH_SECONDS = 1.0
"""Interval of refreshes of leases, and of retries for a store that does not answer; also the timeout of each call."""
LEASE_SECONDS = 3.0
"""After which the leases of a replica that was killed expire: a refresh may be lost or late."""
_LEASE_MS = round(1000 * LEASE_SECONDS)
_CALLS = 8
"""At once to the store: the client has so many connections."""


_COMMON = """
local time = redis.call('TIME')
local now, ms = tonumber(time[1]), tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local function counts(value)
  local requests, tokens = string.match(value or '0 0', '^(%d+) (%d+)$')
  return tonumber(requests), tonumber(tokens)
end
local function add(used, second, requests, tokens)
  local r, t = counts(redis.call('HGET', used, second))
  redis.call('HSET', used, second, string.format('%d %d', math.max(0, r + requests), math.max(0, t + tokens)))
end
local function renew(leases, milliseconds, member)
  redis.call('ZADD', leases, string.format('%d', ms + milliseconds), member)
  redis.call('PEXPIRE', leases, 2 * milliseconds)
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%d', ms))
"""

# KEYS: used leases. ARGV: buckets requests_limit tokens_limit concurrency tokens lease_ms member requests; limits 0 for
# none, requests 0 for further tokens of one that is counted already.
# Returns {'ok', second} or {limit's name, used, milliseconds until the request fits}.
_RESERVE = (
    _COMMON
    + """
local buckets, most, tokens = tonumber(ARGV[1]), {tonumber(ARGV[2]), tonumber(ARGV[3])}, tonumber(ARGV[5])
local concurrency, lease, requests = tonumber(ARGV[4]), tonumber(ARGV[6]), tonumber(ARGV[8])
if concurrency > 0 then
  local held = redis.call('ZCARD', KEYS[2])
  if held >= concurrency then return {'concurrency', held, 0} end
end
local rows, sums, all = {}, {0, 0}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local second = tonumber(all[i])
  if second <= now - buckets then
    redis.call('HDEL', KEYS[1], all[i])
  else
    local r, t = counts(all[i + 1])
    rows[#rows + 1] = {second, r, t}
    sums[1], sums[2] = sums[1] + r, sums[2] + t
  end
end
local needed, names = {requests, tokens}, {'requests_per_minute', 'tokens_per_minute'}
for kind = 1, 2 do
  local excess = sums[kind] + needed[kind] - most[kind]
  if most[kind] > 0 and excess > 0 then
    table.sort(rows, function(a, b) return a[1] < b[1] end)
    local wait = buckets * 1000
    for _, row in ipairs(rows) do
      excess = excess - row[kind + 1]
      if excess <= 0 then wait = (row[1] + buckets) * 1000 - ms break end
    end
    return {names[kind], sums[kind], wait}
  end
end
if most[1] > 0 or most[2] > 0 then
  add(KEYS[1], time[1], requests, tokens)
  redis.call('PEXPIRE', KEYS[1], 1000 * (buckets + 1))
end
if concurrency > 0 then renew(KEYS[2], lease, ARGV[7]) end
return {'ok', now}
"""
)

# KEYS: used leases. ARGV: second unused_tokens member unused_requests.
_RELEASE = (
    _COMMON
    + """
local unused, requests = tonumber(ARGV[2]), tonumber(ARGV[4])
if unused + requests > 0 and redis.call('HGET', KEYS[1], ARGV[1]) then
  add(KEYS[1], ARGV[1], -requests, -unused)
end
redis.call('ZREM', KEYS[2], ARGV[3])
return 1
"""
)

# Renews the leases of a replica, and adds what it admitted while the store did not answer: each number once.
# KEYS: used leases sent. ARGV: buckets lease_ms number members, then the members, then age requests tokens for each
# second.
_REFRESH = (
    _COMMON
    + """
local buckets, lease, number, members = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
for i = 5, 4 + members do renew(KEYS[2], lease, ARGV[i]) end
if #ARGV > 4 + members and number > tonumber(redis.call('GET', KEYS[3]) or 0) then
  for i = 5 + members, #ARGV, 3 do
    add(KEYS[1], string.format('%d', now - tonumber(ARGV[i])), tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]))
  end
  redis.call('PEXPIRE', KEYS[1], 1000 * (buckets + 1))
  redis.call('SET', KEYS[3], string.format('%d', number), 'EX', 2 * buckets)
end
return 1
"""
)


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
        allowed = [limits.requests_per_minute or 0, limits.tokens_per_minute or 0, limits.concurrency or 0]
        arguments: list[int | str] = [BUCKETS, *allowed, tokens, _LEASE_MS, self._member(lease), requests]
        script = Script(_RESERVE, self._keys(tenant), arguments)
        name, *rest = await self._within(self._client.run(script))
        if name == b"ok":
            return int(rest[0])
        limit, used, milliseconds = name.decode(), int(rest[0]), int(rest[1])
        retry = LEASE_RETRY_SECONDS if limit == "concurrency" else milliseconds / 1000
        needed = tokens if limit == "tokens_per_minute" else 1
        raise QuotaExceededError(limit, getattr(limits, limit), used, needed, retry)

    async def release(self, ended: Iterable[Release]) -> None:
        """Releases the leases of requests that have ended, and what they did not use."""
        made = [self._release_script(release) for release in ended]
        await self._within(self._client.run_all(made))

    async def refresh(self, refreshes: SequenceOf[Refresh]) -> list[MemoryStoreError | None]:
        """For each refresh its error, or None."""
        made = [self._refresh_script(refresh) for refresh in refreshes]
        answers = await self._within(self._client.run_all(made))
        return [answer if isinstance(answer, MemoryStoreError) else None for answer in answers]

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

    def _release_script(self, release: Release) -> Script:
        member = self._member(release.lease)
        arguments: list[int | str] = [release.second, release.unused, member, release.unused_requests]
        return Script(_RELEASE, self._keys(release.tenant), arguments)

    def _refresh_script(self, refresh: Refresh) -> Script:
        keys = self._keys(refresh.tenant)
        members = [self._member(lease) for lease in refresh.leases]
        arguments: list[int | str] = [BUCKETS, _LEASE_MS, refresh.number, len(members), *members]
        for age, bucket in refresh.counts.items():
            arguments += [age, bucket.requests, bucket.tokens]
        return Script(_REFRESH, [*keys, f"{keys[0].rpartition(':')[0]}:sent:{self._replica}"], arguments)

    def _keys(self, tenant: str) -> list[str]:
        tag = f"quota:{Naming('', self._secret).part(tenant)}"
        return [f"dw:{{{tag}}}:used", f"dw:{{{tag}}}:places"]

    def _member(self, lease: int) -> str:
        return f"{self._replica}:{lease}"
