"""Sends what this process learned, and its outbox holds, to the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

from draftwood_memory.errors import CorruptValueError, MemoryStoreError, StoreFullError, StoreUnavailableError
from draftwood_memory.records import LoggedRecord, PendingRecord, Record, batched
from draftwood_memory.resident import Resident
from draftwood_memory.residents import Process
from draftwood_memory.store.memories import PAGE, Memories
from draftwood_memory.store.naming import MemoryName
from draftwood_memory.store.purges import id_order
from draftwood_memory.store.space import free_space
from draftwood_memory.store.stored import Append, Entry, MemoryMetadata

_log = logging.getLogger(__name__)

_PUSH_TOKENS = 1 << 18
"""Sent in one round trip at most. It bounds the size of a message."""
_LISTED_SECONDS = 10.0
"""Minimum interval between updates of a memory's last use in the catalogue, which orders preloading and eviction."""
_USE_SECONDS = 600.0
"""Between two notes of which memories were used, if only to draft from: less than any memory's expiry."""
_SPACE_CHECK_SECONDS = 2.0
"""Interval between two searches for memories to delete in a full store. Each asks for the size of all memories."""


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
        for pending in taken:
            groups.setdefault(pending.name, []).append(pending)
        metadata_of = await self._metadata_of(groups)
        sent: list[tuple[MemoryName, int, list[PendingRecord]]] = []
        for name, queued in groups.items():
            if (metadata := metadata_of[name]) is None:
                continue
            if metadata.newer:
                self._counters.newer_records += len(queued)
                settle(queued)
            else:
                current = [pending for pending in queued if metadata.is_current(pending.epoch, pending.began)]
                self._counters.stale += len(queued) - len(current)
                settle({*queued} - {*current})
                sent += [(name, metadata.epoch, batch) for batch in batched(current, record=_record_of)]
        for _, _, batch in sent:
            for pending in batch:  # its time was this process's, if it was learned before the store's was known
                pending.logged.record = replace(
                    _record_of(pending), learned_at=int(self._memories.clock.at(pending.learned))
                )
        batches = [Batch(name, epoch, [*map(_record_of, batch)]) for name, epoch, batch in sent]
        answers = await self._records.write(batches)
        answered = [*zip(sent, answers, strict=True)]
        for (_, _, batch), answer in answered:
            if not isinstance(answer, MemoryStoreError):
                settle(batch)
        for (name, epoch, batch), answer in answered:
            if isinstance(answer, MemoryStoreError):
                self._refuse(name, answer)
            else:
                await self._sent(name, epoch, batch, *answer)

    async def _metadata_of(self, names: Iterable[MemoryName]) -> dict[MemoryName, MemoryMetadata | None]:
        """What is known here of each memory, or, if it is not in this process, to the store; None: nothing yet."""
        found: dict[MemoryName, MemoryMetadata | None] = {}
        elsewhere = []
        for name in names:
            if (resident := self._process.residents.get(name)) is None:
                elsewhere.append(name)
            elif resident.epoch is None or resident.problem:
                found[name] = None
            else:
                since = None if resident.purged_at is None else time.monotonic() - resident.purged_at
                found[name] = MemoryMetadata(resident.epoch, True, resident.newer, since)
        answers = await self._memories.metadata_of([self._process.naming.tag(name) for name in elsewhere])
        for name, metadata in zip(elsewhere, answers, strict=True):
            if isinstance(metadata, MemoryStoreError):
                self._refuse(name, metadata)
            found[name] = metadata if isinstance(metadata, MemoryMetadata) else None
        return found

    async def _sent(
        self, name: MemoryName, epoch: int, batch: list[PendingRecord], id_: bytes | None, metadata: MemoryMetadata
    ) -> None:
        self._refused = False
        resident = self._process.residents.get(name)
        if id_ is not None:
            self._counters.pushed += len(batch)
            self._counters.last_lag = time.monotonic() - batch[0].learned
            if resident is not None:
                resident.note_stored([pending.logged for pending in batch], id_)
        elif metadata.epoch > epoch:
            self._counters.stale += len(batch)
        else:
            self._counters.newer_records += len(batch)
        if resident is not None and resident.epoch == epoch:
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


def _record_of(pending: PendingRecord) -> Record:
    return pending.logged.record


class Batch(NamedTuple):
    """Records of one memory that are written as one entry.

    Attributes:
        new_tokens: tokens of them that the memory in this process does not have yet.
    """

    name: MemoryName
    epoch: int
    records: list[Record]
    new_tokens: int = 0


class RecordStore:
    """The records of a model's memories in a store. Every method that waits may raise MemoryStoreError."""

    def __init__(self, memories: Memories, process: Process) -> None:
        self._memories = memories
        self._process = process
        self._listed: dict[str, float] = {}
        self._used_at = time.monotonic()
        self._space_checked_at = dict.fromkeys(
            (False, True), -_SPACE_CHECK_SECONDS
        )  # each waits for its own kind of look alone

    async def read(self, tag: str, epoch: int) -> tuple[list[LoggedRecord], bytes]:
        """All records of a stream, and the id of its last entry."""
        logged: list[LoggedRecord] = []
        position = b"0-0"
        while entries := await self._memories.read(tag, epoch, position):
            logged += self.decoded(tag, epoch, entries)
            position = entries[-1][0]
            if len(entries) < PAGE:
                break
        return logged, position

    def decoded(self, tag: str, epoch: int, entries: Iterable[Entry], others_only: bool = False) -> list[LoggedRecord]:
        """The records of entries; of other processes only, or of all. What cannot be decoded is logged and counted."""
        logged: list[LoggedRecord] = []
        for id_, value in entries:
            try:
                writer, records = self._process.codec.decode(tag, epoch, value)
            except CorruptValueError as error:
                self._process.counters.unreadable += 1
                _log.error("entry %s of memory %s cannot be read: %s", id_.decode(), tag, error)
                continue
            if not (others_only and writer == self._process.id):
                stored_at = id_order(id_)[0] // 1000  # by the store's clock: no record is younger than its entry is old
                logged += [
                    LoggedRecord(replace(record, learned_at=min(record.learned_at, stored_at)), id_)
                    for record in records
                ]
        return logged

    async def write(self, batches: SequenceOf[Batch]) -> list[tuple[bytes | None, MemoryMetadata] | MemoryStoreError]:
        """Writes entries, in one round trip; for each what `Memories.append` returns."""
        await self.note_use([self._process.naming.tag(batch.name) for batch in batches])
        answers = await self._memories.append([self._append_of([batch]) for batch in batches])
        if any(isinstance(answer, StoreFullError) for answer in answers):
            await self.free_space(is_full=True)
        return answers

    async def begin(self, name: MemoryName, epoch: int, records: SequenceOf[Record]) -> bool:
        """Writes the first records of a memory, all at once; returns whether the store had nothing of it."""
        append = self._append_of([Batch(name, epoch, some) for some in batched(records)])
        for _ in range(2):
            await self.note_use([append.tag])
            [answer] = await self._memories.append([replace(append, begins=True)])
            if not isinstance(answer, StoreFullError):
                break
            await self.free_space(is_full=True)
        if isinstance(answer, MemoryStoreError):
            raise answer
        return answer[0] is not None

    async def append(
        self,
        name: MemoryName,
        epoch: int,
        records: SequenceOf[Record],
        on_stored: Callable[[list[Record], bytes], None],
    ) -> MemoryMetadata:
        """Writes records to a memory at once, as an import does; what the store says of it then.

        Args:
            on_stored: adds the records of an entry, with its id, to the memory in this process.

        Raises:
            MemoryStoreError: those are written that `on_stored` was called with.
        """
        metadata = MemoryMetadata(epoch, True, False, None)
        await self.free_space()  # an import can fill a store faster than the checks come
        for some in batched(records):
            batch = Batch(name, epoch, some, sum(record.tokens.size for record in some))
            [answer] = await self.write([batch])
            if isinstance(answer, StoreFullError):  # some may be free now
                [answer] = await self.write([batch])
            if isinstance(answer, MemoryStoreError):
                raise answer
            id_, metadata = answer
            if id_ is None or metadata.epoch != epoch:
                break
            on_stored(some, id_)
        return metadata

    async def free_space(self, is_full: bool = False) -> None:
        """Deletes memories from a store that is nearly full, or refused a write."""
        now = time.monotonic()
        if now - self._space_checked_at[is_full] >= _SPACE_CHECK_SECONDS:
            self._space_checked_at[is_full] = now
            await free_space(self._memories, self._process.naming.fingerprint, is_full)

    async def note_use(self, tags: Iterable[str]) -> None:
        """Lists memories as used now. Before they are written to, so that there is none that the list does not have."""
        now = time.monotonic()
        due = [tag for tag in dict.fromkeys(tags) if now - self._listed.get(tag, -_LISTED_SECONDS) >= _LISTED_SECONDS]
        try:
            await self._memories.catalogue.note_use(due)
        except StoreFullError:
            await self.free_space(is_full=True)
            return
        self._listed = {tag: at for tag, at in self._listed.items() if now - at < _LISTED_SECONDS}
        self._listed |= dict.fromkeys(due, now)

    async def renew(self, name: MemoryName, epoch: int) -> None:
        """A memory is used: renews its expiry in the store."""
        config = self._process.residents.config_of(name)
        if not config.stored_seconds and config.orphan_ttl:
            await self._memories.renew(self._process.naming.tag(name), epoch, config.orphan_ttl)

    async def renew_used(self) -> None:
        """Memories that are only drafted from count as used, too."""
        now = time.monotonic()
        if now - self._used_at < _USE_SECONDS:
            return
        used = [
            resident
            for resident in self._process.residents.all()
            if resident.loaded and resident.used_at >= self._used_at
        ]
        await self.note_use([resident.tag for resident in used])
        for resident in used:
            await self.renew(resident.name, resident.epoch or 0)
        await self._memories.forget_listed(self._process.naming.fingerprint)
        self._used_at = now

    def _append_of(self, batches: list[Batch]) -> Append:
        """Entries of one memory."""
        batch = batches[-1]
        tag, resident = self._process.naming.tag(batch.name), self._process.residents.get(batch.name)
        log = resident.log if resident is not None and resident.loaded else None
        config = self._process.residents.config_of(batch.name)
        return Append(
            tag=tag,
            epoch=batch.epoch,
            name=self._process.codec.encode_name(tag, batch.name),
            values=[self._process.codec.encode(tag, batch.epoch, self._process.id, batch.records) for batch in batches],
            first_id=None if resident is None else resident.first_id(),
            max_bytes=config.bytes,
            expiry=config.expiry,
            tokens=None if log is None else min(log.tokens + batch.new_tokens, config.tokens),
        )
