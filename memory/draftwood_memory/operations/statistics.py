"""The memories of a store and of this process, with their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood_memory.counters import MemoryCounters
from draftwood_memory.memory import Memory
from draftwood_memory.store.naming import MemoryName
from draftwood_memory.store.stored import StoredMemory


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """One memory, in the store and in this process.

    Attributes:
        resident: it is in this process, with indexes of `index_bytes`.
    """

    name: MemoryName
    stored: StoredMemory
    resident: bool
    index_bytes: int


@dataclass(frozen=True, slots=True)
class StatisticsReport:
    """The memories of a store, and this process's use of it.

    Attributes:
        memories: the latest written first.
        following: `first` of the next page; None if there is none.
        store: its address, without passwords.
        healthy: the latest call to the store succeeded.
        max_bytes: bound of all memories in this process.
        exists: there is a memory in the store or in this process.
    """

    memories: list[MemoryStatistics]
    following: int | None
    store: str
    healthy: bool
    counters: MemoryCounters
    max_bytes: int
    exists: bool


@dataclass(frozen=True, slots=True)
class GetStatistics:
    """Statistics of one tenant's memories, or of all tenants' with None.

    Memories that hold no records since a purge, or that cannot be decoded here, are left out.

    Attributes:
        first: how many memories are skipped.
        limit: of the memories looked at.
    """

    tenant: str | None
    first: int = 0
    limit: int = 1000

    async def run(self, memory: Memory) -> StatisticsReport:
        here = {one.tag: one for one in memory.residents.all()}
        if memory.memories is None:
            tags = [tag for tag, one in reversed(here.items()) if self.tenant in (None, one.name.tenant)]
        elif self.tenant is None:
            tags = await memory.memories.catalogue.tags(memory.naming.fingerprint)
        else:
            part = memory.naming.part(self.tenant)
            tags = sorted(await memory.memories.tags_of(part, memory.naming.fingerprint))
        end = self.first + self.limit
        found = await self._stored(memory, tags[self.first : end])
        statistics = []
        for name, stored in found:
            resident = here.get(stored.tag)
            index_bytes = 0 if resident is None else resident.index_bytes
            statistics.append(MemoryStatistics(name, stored, resident is not None, index_bytes))
        return StatisticsReport(
            memories=statistics,
            following=end if end < len(tags) else None,
            store="memory" if memory.memories is None else memory.memories.client.description,
            healthy=memory.thread.healthy,
            counters=memory.counters(),
            max_bytes=memory.config.max_bytes,
            exists=bool(found) or any(one.name.tenant == self.tenant for one in here.values()),
        )

    async def _stored(self, memory: Memory, tags: list[str]) -> list[tuple[MemoryName, StoredMemory]]:
        if memory.memories is None:
            some = [one for one in memory.residents.all() if one.tag in tags and len(one.log)]
            sizes = {one.tag: (one.log.tokens, one.log.nbytes, len(one.log), False) for one in some}
            return [
                (one.name, StoredMemory(one.tag, b"", one.generation or 0, *sizes[one.tag])) for one in reversed(some)
            ]
        found = []
        for stored in await memory.memories.info(tags):
            name = memory.name_of(stored)
            if name is not None:
                found.append((name, stored))
        return found
