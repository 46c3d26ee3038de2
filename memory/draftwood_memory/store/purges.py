"""Which tenants were purged, and which processes have seen it: a purge waits for them.

A sorted set has the purged tenants by the time of their last purge, and another one the processes by the time up to
which they have applied purges. Each process reads the first one and notes its time in the second one every
`SEE_SECONDS`. So a purge is final as soon as every process has a later time. A process that cannot reach the store
keeps its time; `LEASE_SECONDS` later it has forgotten what it holds (see `Purges.lapsed`).

Times are microseconds by the clock of the server that has both sets, and none is less than one given before.
"""

from __future__ import annotations

import asyncio
import time

from draftwood_memory.store.naming import PROCESSES_KEY, PURGES_KEY
from draftwood_memory.store.redis_client import RedisClient, Script

LEASE_SECONDS = 24 * 3600.0
"""How long a process drafts from memories without having reached the store: longer than any outage should be."""
SEE_SECONDS = 0.25
"""Between two looks at purges: how long one takes to be final, at most, unless the memory thread is busy."""
_SILENT_SECONDS = 5.0
"""A process that has noted no time for so long has lost the store, or ended: no purge waits for it.
The memory thread is busy for at most a second at once."""
_WAIT_SECONDS = 8.0
_POLL_SECONDS = 0.01
_KEYS = PURGES_KEY, PROCESSES_KEY, f"{PURGES_KEY}:none"
_NOW = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
for i = 1, 2 do
  local latest = redis.call('ZRANGE', KEYS[i], 0, 0, 'REV', 'WITHSCORES')
  if latest[2] then now = math.max(now, tonumber(latest[2]) + i % 2) end
end
local text = string.format('%.0f', now)
redis.call('DEL', KEYS[3]) -- what needs no memory first: then a full server accepts the rest
"""
"""The time: later than every purge, and not before what any process has noted."""
_SEE = (
    _NOW
    + """
local process, since = unpack(ARGV)
if tonumber(since) > now then since = '0' end
local missed = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. since, '+inf')
if #missed == 0 then redis.call('ZADD', KEYS[2], text, process) end
return {text, missed}
"""
)
_ANNOUNCE = (
    _NOW
    + """
text = string.format('%.0f', now + 1)
redis.call('ZADD', KEYS[1], text, ARGV[1])
for i = 1, 2 do redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', string.format('%.0f', now - 1000000 * ARGV[2])) end
return text
"""
)


class Purges:
    """The purges that this process sees, among the processes that use a store. Methods may raise MemoryStoreError.

    Args:
        process: identifies this one.

    Attributes:
        seen_at: when it last saw all purges, on the clock of `time.monotonic`.
    """

    def __init__(self, client: RedisClient, process: str) -> None:
        self.seen_at = time.monotonic()
        self._client = client
        self._process = process
        self._seen = 0

    @property
    def due(self) -> bool:
        """It is time to look again."""
        return not self._seen or time.monotonic() - self.seen_at >= SEE_SECONDS

    @property
    def lapsed(self) -> bool:
        """No purge waits for this process any more, so it has to forget all records."""
        return time.monotonic() - self.seen_at > LEASE_SECONDS

    async def missed(self) -> tuple[int, frozenset[str]]:
        """The store's time, and the tenants, as named in keys, that were purged and not `applied` here.

        If there are none, the store notes the time.
        """
        began = time.monotonic()
        text, missed = await self._client.run(Script(_SEE, _KEYS, (self._process, self._seen)))
        if not missed:
            self._seen, self.seen_at = int(text), began
        return int(text), frozenset(part.decode() for part in missed)

    def applied(self, seen: int) -> None:
        """This process has applied all purges up to this time; the next `missed` tells the store."""
        self._seen = seen

    async def leave(self) -> None:
        await self._client.command("ZREM", PROCESSES_KEY, self._process)

    async def announce(self, part: str) -> int:
        """Tells all processes that a tenant, by its name in keys, was purged; returns the time."""
        return int(await self._client.run(Script(_ANNOUNCE, _KEYS, (part, round(2 * LEASE_SECONDS)))))

    async def wait(self, purged: int) -> float:
        """Waits until the other processes that the store hears of have seen a purge.

        Args:
            purged: its time.

        Returns:
            Seconds until it is final: 0 if it is, else until those that lost the store have forgotten what they hold.
        """
        began = time.monotonic()
        while True:
            seen_by = await self._client.command("ZRANGE", PROCESSES_KEY, 0, -1, "WITHSCORES")
            times = {name.decode(): float(at) for name, at in zip(seen_by[::2], seen_by[1::2], strict=True)}
            waited = time.monotonic() - began
            silent = [
                (purged - at) / 1e6 + waited for name, at in times.items() if name != self._process and at < purged
            ]
            if waited >= _WAIT_SECONDS or all(seconds >= _SILENT_SECONDS for seconds in silent):
                return max(0.0, LEASE_SECONDS - min(silent, default=LEASE_SECONDS))
            await asyncio.sleep(_POLL_SECONDS)


def id_order(id_: bytes) -> tuple[int, int]:
    """Ids of entries in their order."""
    time_, _, number = id_.partition(b"-")
    return int(time_), int(number)
