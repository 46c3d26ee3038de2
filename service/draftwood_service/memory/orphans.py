"""Memories that no process uses: their model is not served any more, or not with their key for names.

Every process notes in the store which kind of memories it uses, so that the others can tell.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from draftwood_service.memory.codec import Codec
from draftwood_service.memory.errors import CorruptValueError, NewerMemoryError
from draftwood_service.memory.naming import MemoryName, Naming, fingerprint_of, kind_of
from draftwood_service.memory.store.base import MemoryStore, StoredMemoryInfo

ORPHANED_SECONDS = 3600.0
"""A kind of memories that no process has used for so long is orphaned. Not tuned: longer than a restart takes."""


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """How many memories were emptied, and how many tokens they had in the store."""

    memories: int
    tokens: int


@dataclass(frozen=True, slots=True)
class OrphanedMemory:
    """A memory that no process uses.

    Attributes:
        name: None if it cannot be decrypted here.
        unserved: seconds since a process noted that it uses memories of this kind.
    """

    name: MemoryName | None
    stored: StoredMemoryInfo
    unserved: float

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.stored.tag)


async def orphans(store: MemoryStore, naming: Naming, codec: Codec, seconds: float) -> list[OrphanedMemory]:
    """The memories of kinds that were not used for `seconds`, ordered by tag; without those that hold nothing.

    Raises:
        MemoryStoreError: the store failed.
    """
    kinds = await store.kinds()
    kinds.pop(naming.kind, None)
    unserved = {kind: since for kind, since in kinds.items() if since >= seconds}
    found: list[OrphanedMemory] = []
    for fingerprint in sorted({fingerprint_of(kind) for kind in unserved}):
        tags = sorted(tag for tag in await store.tags(fingerprint) if kind_of(tag) in unserved)
        for info in await store.info(tags):
            if info.bytes:
                found.append(OrphanedMemory(_name(codec, info), info, unserved[kind_of(info.tag)]))
    return found


async def purge_all(store: MemoryStore, memories: SequenceOf[OrphanedMemory]) -> PurgeResult:
    """Purges memories, except those that a newer version wrote to. Raises MemoryStoreError."""
    purged, tokens = 0, 0
    for one in memories:
        try:
            await store.purge(one.stored.tag, 0)
        except NewerMemoryError:
            continue
        purged += 1
        tokens += one.stored.tokens
    return PurgeResult(purged, tokens)


def _name(codec: Codec, info: StoredMemoryInfo) -> MemoryName | None:
    try:
        return codec.decode_name(info.tag, info.name)
    except CorruptValueError:
        return None
