"""Memories that no process uses: their model is not served any more, or their names are hidden by another key."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood_memory.memory import Memory
from draftwood_memory.operations.purging import PurgeResult
from draftwood_memory.store.naming import MemoryName, fingerprint_of, kind_of
from draftwood_memory.store.stored import StoredMemory

ORPHANED_SECONDS = 3600.0
"""A kind of memories that no process has used for so long is orphaned: longer than a restart takes."""


@dataclass(frozen=True, slots=True)
class OrphanedMemory:
    """A memory that no process uses: its model is not served any more, or not with its key for names.

    Attributes:
        name: None if it cannot be decrypted here.
        unserved: seconds since a process noted that it uses memories of this kind.
    """

    name: MemoryName | None
    stored: StoredMemory
    unserved: float

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.stored.tag)


@dataclass(frozen=True, slots=True)
class ListOrphans:
    """The memories that no process has used for an hour, ordered by tag."""

    async def run(self, memory: Memory) -> list[OrphanedMemory]:
        if memory.memories is None:
            return []
        kinds = await memory.memories.catalogue.kinds()
        kinds.pop(memory.naming.kind, None)
        unserved = {kind: since for kind, since in kinds.items() if since >= ORPHANED_SECONDS}
        found: list[OrphanedMemory] = []
        for fingerprint in sorted({fingerprint_of(kind) for kind in unserved}):
            tags = sorted(tag for tag in await memory.memories.catalogue.tags(fingerprint) if kind_of(tag) in unserved)
            for info in await memory.memories.info(tags):
                found.append(OrphanedMemory(memory.name_of(info), info, unserved[kind_of(info.tag)]))
        return found


@dataclass(frozen=True, slots=True)
class PurgeOrphans:
    """Deletes the memories that no process uses, except those that a newer version wrote to.

    Attributes:
        fingerprint: only those of this model; "" for all.
    """

    fingerprint: str = ""

    async def run(self, memory: Memory) -> PurgeResult:
        chosen = [one.stored for one in await ListOrphans().run(memory) if self.fingerprint in ("", one.fingerprint)]
        chosen = [one for one in chosen if not one.newer]
        for one in chosen:
            assert memory.memories is not None
            await memory.memories.delete(one.tag, one.generation)
        return PurgeResult(len(chosen), sum(one.tokens for one in chosen))
