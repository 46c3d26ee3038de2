"""Folds logs into snapshots, under a lease, so that one process at a time does it for a memory."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import structlog

from draftwood_service.memory.codec import Codec, Record, Snapshot
from draftwood_service.memory.errors import MemoryStoreError, StoreFullError, StoreUnavailableError
from draftwood_service.memory.replica.counters import MemoryCounters
from draftwood_service.memory.replica.residents import Resident, Residents
from draftwood_service.memory.store.base import Fold, MemoryStore

_log = structlog.get_logger(__name__)

_LEASE_SECONDS = 15.0
"""Of the right to fold a memory; a process that dies while it folds delays the next fold by so long. Not tuned: a fold
of a million tokens takes a fifth of a second."""
_TAIL_ENTRIES = 256
_TAIL_SHARE = 4
"""At most so many of the newest records, and a quarter of the memory's bytes, stay in the log beside the snapshot, so
that a process that is less than that behind reads on instead of starting over. Not tuned."""


class Folder:
    """Writes the snapshots of this process's memories.

    Args:
        holder: identifies this process in leases.
    """

    def __init__(
        self, store: MemoryStore, residents: Residents, codec: Codec, counters: MemoryCounters, holder: str
    ) -> None:
        self._store = store
        self._residents = residents
        self._codec = codec
        self._counters = counters
        self._holder = holder

    async def fold(self) -> None:
        """Writes the snapshots that are due. Raises StoreUnavailableError."""
        for resident in self._residents.all():
            if not (resident.fold_due and resident.foldable and resident.loaded and resident.log.position):
                continue
            resident.fold_due = False
            try:
                if await self._store.lease(resident.tag, self._holder, _LEASE_SECONDS):
                    self._counters.folds += await self._store.fold(self.snapshot(resident), self._holder)
            except StoreUnavailableError:
                raise
            except MemoryStoreError as error:
                _log.error("memory cannot be folded", memory=resident.tag, why=str(error))

    async def seed(self, resident: Resident) -> bool:
        """Restores a memory to a store that has nothing of it; False if the store is full or has something of it."""
        try:
            return await self._store.seed(self.snapshot(resident))
        except StoreFullError:
            return False

    def snapshot(self, resident: Resident) -> Fold:
        """The snapshot of a memory's log, as the store takes it."""
        log = resident.log
        records = [*log]
        epoch = resident.epoch or 0
        snapshot = Snapshot(self._codec.fingerprint, epoch, log.position, log.chain, records)
        return Fold(
            tag=resident.tag,
            epoch=epoch,
            position=log.position,
            chain=log.chain,
            value=self._codec.encode_snapshot(resident.tag, snapshot),
            tokens=log.tokens,
            records=len(records),
            name=self._codec.encode_name(resident.tag, resident.name),
            marks=log.marks,
            tail=_tail(records, resident.capacity.bytes // _TAIL_SHARE),
            limits=resident.limits,
        )


def _tail(records: SequenceOf[Record], max_bytes: int) -> int:
    """How many of the newest records stay in the log beside the snapshot."""
    for count, record in enumerate(reversed(records)):
        max_bytes -= record.weight
        if count == _TAIL_ENTRIES or max_bytes < 0:
            return count
    return len(records)
