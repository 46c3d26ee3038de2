"""Sends what this process learned, and its outbox holds, to the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from draftwood_memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_memory.local.outbox import PendingRecord
from draftwood_memory.local.process import Process
from draftwood_memory.local.resident import Resident
from draftwood_memory.records import Record, batched
from draftwood_memory.replication.record_store import Batch, RecordStore
from draftwood_memory.store.memories import Memories
from draftwood_memory.store.naming import MemoryName
from draftwood_memory.store.stored import MemoryMetadata

_log = logging.getLogger(__name__)

_PUSH_TOKENS = 1 << 18
"""Sent in one round trip at most. It bounds the size of a message."""


class Sender:
    """Runs on the memory thread.

    Args:
        apply_metadata: called with what the store says of a memory in this process.
        postpone: called with a memory in this process whose node of a cluster does not answer, and the error.
    """

    def __init__(
        self,
        memories: Memories,
        records: RecordStore,
        process: Process,
        apply_metadata: Callable[[Resident, MemoryMetadata], Awaitable[None]],
        postpone: Callable[[Resident, MemoryStoreError], None],
    ) -> None:
        self._memories = memories
        self._records = records
        self._process = process
        self._outbox, self._counters = process.outbox, process.counters
        self._apply_metadata, self._postpone = apply_metadata, postpone
        self._refused = False

    async def push(self) -> None:
        """Sends the outbox. Raises StoreUnavailableError."""
        refused = frozenset[MemoryName]()
        while taken := self._outbox.take(_PUSH_TOKENS, refused):
            unsent = {id(pending): pending for pending in taken}
            try:
                await self._send(taken, unsent)
            finally:
                self._outbox.requeue(unsent.values())
            refused |= {pending.name for pending in unsent.values()}

    async def _send(self, taken: list[PendingRecord], unsent: dict[int, PendingRecord]) -> None:
        """Removes from `unsent`, which has them by their `id`, those that were sent, or refused for good: also if it
        raises later, so that no record is sent twice."""

        def settle(records: Iterable[PendingRecord]) -> None:
            for pending in records:
                del unsent[id(pending)]

        groups: dict[MemoryName, list[PendingRecord]] = {}
        for one in taken:
            groups.setdefault(one.name, []).append(one)
        metadata_of = await self._metadata_of(groups)
        sent: list[tuple[MemoryName, int, list[PendingRecord]]] = []
        for name, pending in groups.items():
            if (metadata := metadata_of[name]) is None:
                continue
            if metadata.newer:
                self._counters.newer_records += len(pending)
                settle(pending)
            else:
                current = [one for one in pending if metadata.is_current(one.generation, one.began)]
                self._counters.stale += len(pending) - len(current)
                settle({*pending} - {*current})
                sent += [(name, metadata.generation, batch) for batch in batched(current, record=_record_of)]
        for _, _, batch in sent:
            for one in batch:  # its time was this process's, if it was learned before the store's was known
                one.logged.record = replace(_record_of(one), learned_at=int(self._memories.clock.at(one.learned)))
        batches = [Batch(name, generation, [*map(_record_of, batch)]) for name, generation, batch in sent]
        answers = await self._records.write(batches)
        answered = [*zip(sent, answers, strict=True)]
        for (_, _, batch), answer in answered:
            if not isinstance(answer, MemoryStoreError):
                settle(batch)
        for (name, generation, batch), answer in answered:
            if isinstance(answer, MemoryStoreError):
                self._refuse(name, answer)
            else:
                await self._sent(name, generation, batch, *answer)

    async def _metadata_of(self, names: Iterable[MemoryName]) -> dict[MemoryName, MemoryMetadata | None]:
        """What is known here of each memory, or, if it is not in this process, to the store; None: nothing yet."""
        found: dict[MemoryName, MemoryMetadata | None] = {}
        elsewhere = []
        for name in names:
            if (resident := self._process.residents.get(name)) is None:
                elsewhere.append(name)
            elif resident.generation is None or resident.problem:
                found[name] = None
            else:
                since = None if resident.purged_at is None else time.monotonic() - resident.purged_at
                found[name] = MemoryMetadata(resident.generation, True, resident.newer, since)
        answers = await self._memories.metadata_of([self._process.naming.tag(name) for name in elsewhere])
        for name, metadata in zip(elsewhere, answers, strict=True):
            if isinstance(metadata, MemoryStoreError):
                self._refuse(name, metadata)
            found[name] = metadata if isinstance(metadata, MemoryMetadata) else None
        return found

    async def _sent(
        self, name: MemoryName, generation: int, batch: list[PendingRecord], id_: bytes, metadata: MemoryMetadata
    ) -> None:
        self._refused = False
        if metadata.generation > generation:
            self._counters.stale += len(batch)
            await self._memories.unlink(self._process.naming.tag(name), generation)
        else:
            self._counters.pushed += len(batch)
            self._counters.last_lag = time.monotonic() - batch[0].learned
        resident = self._process.residents.get(name)
        if resident is not None:
            resident.note_stored([pending.logged for pending in batch], id_)
        if resident is not None and resident.generation == generation:
            await self._apply_metadata(resident, metadata)

    def _refuse(self, name: MemoryName, error: MemoryStoreError) -> None:
        if isinstance(error, StoreUnavailableError):
            if not self._memories.client.is_cluster:
                raise error
            if (resident := self._process.residents.get(name)) is not None:
                self._postpone(resident, error)
        if not self._refused:
            self._refused = True  # logged once, until the store accepts records again
            _log.error("store refuses learned records of %s: %s", self._process.naming.tag(name), error)


def _record_of(one: PendingRecord) -> Record:
    return one.logged.record
