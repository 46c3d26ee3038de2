"""The processes that use a store's memories, and which purges each of them has applied: a purge waits for them.

A sorted set names the processes. Each has a key with the id of the latest purge that it has applied, which it renews
every other second and which expires `LEASE_SECONDS` after it reached the store last. By then a process that cannot
reach the store has forgotten what it holds (see `Processes.lapsed`). So a purge is final as soon as every process
has applied it, and at the latest when the keys of those that do not answer have expired.
"""

from __future__ import annotations

import asyncio
import time

from draftwood_memory.store.clock import StoreClock
from draftwood_memory.store.naming import PROCESSES_KEY, PURGES_KEY, process_key
from draftwood_memory.store.redis_client import RedisClient, write_when_full

LEASE_SECONDS = 24 * 3600.0
"""How long a process drafts from memories without having reached the store: longer than any outage should be."""
RENEW_SECONDS = 2.0
_SILENT_SECONDS = 5.0
"""A process that has not renewed its key for so long has lost the store, or ended: no purge waits for it.
The memory thread is busy for at most a second at once."""
_WAIT_SECONDS = 8.0
_POLL_SECONDS = 0.005
_PURGES = 1000
"""Purges that a replica can catch up on; one that missed more compares all its memories when it reconnects."""


class Processes:
    """This process among those that use a store. Every method may raise MemoryStoreError.

    Args:
        process: identifies this one.

    Attributes:
        applied: id of the latest purge that this process has applied.
        reached_at: when it last reached the store, on the clock of `time.monotonic`.
    """

    def __init__(self, client: RedisClient, clock: StoreClock, process: str) -> None:
        self.applied = b"0-0"
        self.reached_at = time.monotonic()
        self._client = client
        self._clock = clock
        self._process = process

    @property
    def lapsed(self) -> bool:
        """The lease of this process has expired: no purge waits for it, so it has to forget all records."""
        return time.monotonic() - self.reached_at > LEASE_SECONDS

    async def latest(self) -> bytes:
        """The id of the latest purge."""
        found = await self._client.command("XREVRANGE", PURGES_KEY, "+", "-", "COUNT", 1)
        return found[0][0] if found else b"0-0"

    async def missed(self) -> tuple[bytes, frozenset[str]]:
        """The id of the latest purge, and the tenants, as named in keys, of those that were not applied here."""
        found = await self._client.command("XRANGE", PURGES_KEY, b"(" + self.applied, "+")
        return (found[-1][0] if found else self.applied), frozenset(fields[b"t"].decode() for _, fields in found)

    async def apply(self, id_: bytes) -> None:
        """This process has applied all purges up to this one."""
        self.applied = max(self.applied, id_, key=id_order)
        began = time.monotonic()
        await self._client.results(
            [
                write_when_full("ZADD", PROCESSES_KEY, int(self._clock.now()), self._process),
                write_when_full("SET", process_key(self._process), self.applied, "PX", round(1000 * LEASE_SECONDS)),
            ]
        )
        self.reached_at = began

    async def leave(self) -> None:
        await self._client.results([("DEL", process_key(self._process)), ("ZREM", PROCESSES_KEY, self._process)])

    async def announce(self, part: str) -> bytes:
        """Tells all processes that a tenant, by its name in keys, was purged; returns the purge's id."""
        id_: bytes = await self._client.command(
            *write_when_full("XADD", PURGES_KEY, "MAXLEN", "~", _PURGES, "*", "t", part)
        )
        return id_

    async def wait(self, id_: bytes) -> float:
        """Waits until the other processes that the store hears of have applied a purge.

        Returns:
            Seconds until it is final: 0 if it is, else until those that lost the store have forgotten what they hold.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        await self._client.command(
            "ZREMRANGEBYSCORE", PROCESSES_KEY, "-inf", int(self._clock.now() - 2 * LEASE_SECONDS)
        )
        names = {name.decode() for name in await self._client.command("ZRANGE", PROCESSES_KEY, 0, -1)}
        waiting, final_in = [process_key(name) for name in sorted(names - {self._process})], 0.0
        while waiting:
            answers = await self._client.results([(word, key) for key in waiting for word in ("GET", "PTTL")])
            found, waiting = zip(waiting, answers[::2], answers[1::2], strict=True), []
            for key, applied, left in found:
                if applied is None or id_order(applied) >= id_order(id_):
                    continue
                if left / 1000 > LEASE_SECONDS - _SILENT_SECONDS and time.monotonic() < deadline:
                    waiting.append(key)
                else:
                    final_in = max(final_in, left / 1000)
            await asyncio.sleep(_POLL_SECONDS if waiting else 0)
        return final_in


def id_order(id_: bytes) -> tuple[int, int]:
    """Ids of entries in their order."""
    time_, _, number = id_.partition(b"-")
    return int(time_), int(number)
