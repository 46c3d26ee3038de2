"""Which memories a store has, by the time of their last use, and which kinds of them processes serve."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from draftwood_memory.store.clock import StoreClock
from draftwood_memory.store.naming import KINDS_KEY, fingerprint_of, memories_key
from draftwood_memory.store.redis_client import RedisClient


class Catalogue:
    """The lists of a store. Every method may raise MemoryStoreError."""

    def __init__(self, client: RedisClient, clock: StoreClock) -> None:
        self._client = client
        self._clock = clock

    async def note_use(self, tags: SequenceOf[str]) -> None:
        """Lists memories as used now."""
        now = f"{self._clock.now():.3f}"
        await self._client.results([("ZADD", memories_key(fingerprint_of(tag)), now, tag) for tag in tags])

    async def tags(self, fingerprint: str) -> list[str]:
        """The memories of a model, the latest used first."""
        found = await self._client.command("ZRANGE", memories_key(fingerprint), 0, -1, "REV")
        return [tag.decode() for tag in found]

    async def by_use(self, fingerprints: Iterable[str]) -> list[tuple[str, float]]:
        """The memories of some models, the least recently used first, each with the Unix time of its use."""
        keys = [memories_key(one) for one in fingerprints]
        found = await self._client.results([("ZRANGE", key, 0, -1, "WITHSCORES") for key in keys])
        return sorted([pair for some in found for pair in _pairs(some)], key=lambda one: one[1])

    async def used_before(self, fingerprint: str, time: float) -> list[tuple[str, float]]:
        """Those memories of a model that were last used before a Unix time, each with the time of its use."""
        command = "ZRANGEBYSCORE", memories_key(fingerprint), "-inf", f"({time:.3f}", "WITHSCORES"
        return _pairs(await self._client.command(*command))

    async def remove(self, fingerprint: str, times: Iterable[float]) -> None:
        """Removes memories by the times of their use, so that one stays that is used meanwhile."""
        key = memories_key(fingerprint)
        await self._client.results([("ZREMRANGEBYSCORE", key, repr(at), repr(at)) for at in times])

    async def note_kind(self, kind: str) -> None:
        """A process uses memories of a kind, see `Naming.kind`, now."""
        await self._client.command("ZADD", KINDS_KEY, int(self._clock.now()), kind)

    async def kinds(self) -> dict[str, float]:
        """For each kind of memories, the seconds since a process noted that it uses them."""
        now = self._clock.now()
        found = await self._client.command("ZRANGE", KINDS_KEY, 0, -1, "WITHSCORES")
        return {kind: max(0.0, now - at) for kind, at in _pairs(found)}


def _pairs(answer: list[Any]) -> list[tuple[str, float]]:
    return [(name.decode(), float(score)) for name, score in zip(answer[::2], answer[1::2], strict=True)]
