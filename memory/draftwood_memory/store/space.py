"""Eviction from a store that is nearly full: the memories that were used longest ago are deleted first.

The store itself evicts nothing (`noeviction`), since tenants' configuration is in it, too. Processes that make room at
the same time choose the same memories. What is deleted may still be in processes that use it; only drafts are lost.
"""

from __future__ import annotations

import logging

from draftwood_memory.config import surplus
from draftwood_memory.store.memories import Memories
from draftwood_memory.store.naming import fingerprint_of, tenant_part
from draftwood_memory.store.stored import StoredMemory

_log = logging.getLogger(__name__)
_NEARLY_FULL, _ENOUGH = 0.85, 0.75
"""Of what the store's limit leaves for memories: they are deleted above the first until the second. The rest is for
tenants' configuration, quotas and the counts of experiments, and for what replicas write until one looks again."""
_UNKNOWN_PART = 0.1
"""Of the memories' bytes, which is deleted if the store is full and its limit is not known."""
_LARGEST_PART = 0.5
"""Of the memories' bytes, deleted at once at most. What the store uses besides, such as buffers, may soon be free."""
_RECENT_SECONDS = 24 * 3600.0
"""A memory that was used since then is deleted only if its tenant has more than its share."""


async def free_space(memories: Memories, fingerprint: str, is_full: bool) -> None:
    """Deletes memories of all models if the store is nearly full. Raises MemoryStoreError.

    Args:
        fingerprint: of a model that this process serves.
        is_full: the store has refused a write.
    """
    used, limit = await memories.usage()
    if not is_full and not _nearly_full(used, limit, memories.other_bytes):
        return
    models = {fingerprint, *map(fingerprint_of, await memories.catalogue.kinds())}
    used_at = dict(await memories.catalogue.by_use(models))
    deletable = [stored for stored in await memories.info([*used_at]) if not stored.newer]
    total = sum(stored.bytes for stored in deletable)
    memories.other_bytes = others = max(0, used - total)
    if not is_full and not _nearly_full(used, limit, others):
        return
    beyond = used - others - _ENOUGH * max(0, limit - others)
    wanted = max(beyond, _UNKNOWN_PART * total if is_full else 0)
    wanted = min(wanted, _LARGEST_PART * total)
    chosen = _chosen(deletable, used_at, memories.clock.now() - _RECENT_SECONDS, int(wanted))
    for stored in chosen:
        await memories.delete(stored.tag, stored.epoch)
    freed = sum(stored.bytes for stored in chosen)
    text = "the store is nearly full: %d of %d memories were deleted, those used longest ago first; %.1f of %.1f MiB"
    _log.warning(text, len(chosen), len(deletable), freed / 2**20, total / 2**20)


def _nearly_full(used: int, limit: int, others: int) -> bool:
    """Whether memories take most of what the limit leaves for them beside other data and the server itself."""
    return used - others > _NEARLY_FULL * (limit - others)


def _chosen(deletable: list[StoredMemory], used_at: dict[str, float], recent: float, wanted: int) -> list[StoredMemory]:
    """Memories of so many bytes; `deletable` is in the order of their use."""
    chosen = []
    for stored in deletable:
        if wanted <= 0 or used_at[stored.tag] >= recent:
            break
        chosen.append(stored)
        wanted -= stored.bytes
    if wanted > 0:
        rest = [(stored, tenant_part(stored.tag), stored.bytes) for stored in deletable[len(chosen) :]]
        chosen += surplus(rest, sum(size for _, _, size in rest) - wanted)
    return chosen
