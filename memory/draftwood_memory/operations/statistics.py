"""The memories of a store and of this process, with their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood_memory.counters import MemoryCounters
from draftwood_memory.errors import MemoryStoreError
from draftwood_memory.memory import Memory
from draftwood_memory.store.memories import Memories
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
        memories: the latest written first; those in this process, the latest used first, if the store fails.
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
    """Statistics of one tenant's memories, or of all tenants' with None. Without an answer of the store, of those in
    this process.

    Memories that hold no records since a purge, or that cannot be decoded here, are left out.

    Attributes:
        first: how many memories are skipped.
        limit: of the memories looked at.

    Raises:
        MemoryStoreError: the store failed, and nothing of the tenant is in this process.
    """

    tenant: str | None
    first: int = 0
    limit: int = 1000

    async def run(self, memory: Memory) -> StatisticsReport:
        here = {resident.tag: resident for resident in memory.residents.all()}
        is_here = any(resident.name.tenant == self.tenant for resident in here.values())
        healthy = memory.thread.healthy
        try:
            tags, page = await self._page(memory, memory.memories)
        except MemoryStoreError:
            if self.tenant is not None and not is_here:
                raise  # the store may have it
            healthy, (tags, page) = False, await self._page(memory, None)
        statistics = []
        for name, stored in page:
            resident = here.get(stored.tag)
            index_bytes = 0 if resident is None else resident.index_bytes
            statistics.append(MemoryStatistics(name, stored, resident is not None, index_bytes))
        end = self.first + self.limit
        return StatisticsReport(
            memories=statistics,
            following=end if end < len(tags) else None,
            store="memory" if memory.memories is None else memory.memories.client.description,
            healthy=healthy,
            counters=memory.counters(),
            max_bytes=memory.config.max_bytes,
            exists=bool(page) or is_here,
        )

    async def _page(
        self, memory: Memory, store: Memories | None
    ) -> tuple[list[str], list[tuple[MemoryName, StoredMemory]]]:
        """All tags, and the memories of the page: of this process without a store. Raises MemoryStoreError."""
        if store is None:
            residents = [r for r in reversed(memory.residents.all()) if self.tenant in (None, r.name.tenant)]
            tags = [resident.tag for resident in residents]
        elif self.tenant is None:
            tags = await store.catalogue.tags(memory.naming.fingerprint)
        else:
            part = memory.naming.part(self.tenant)
            tags = sorted(await store.tags_of(part, memory.naming.fingerprint))
        shown = slice(self.first, self.first + self.limit)
        if store is not None:
            infos = [(memory.name_of(info), info) for info in await store.info(tags[shown])]
            return tags, [(name, info) for name, info in infos if name is not None]
        memories = []
        for resident in residents[shown]:
            if len(resident.log):
                sizes = resident.log.tokens, resident.log.nbytes, len(resident.log), resident.newer
                stored = StoredMemory(resident.tag, b"", resident.generation or 0, *sizes)
                memories.append((resident.name, stored))
        return tags, memories
