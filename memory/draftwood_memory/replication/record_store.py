"""Records of memories in the store: encoded there, bounded there, listed there as used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

from draftwood_memory.errors import CorruptValueError, MemoryStoreError, StoreFullError
from draftwood_memory.local.process import Process
from draftwood_memory.local.record_log import LoggedRecord
from draftwood_memory.records import Record, batched
from draftwood_memory.store.eviction import free_space
from draftwood_memory.store.memories import PAGE, Memories
from draftwood_memory.store.naming import MemoryName
from draftwood_memory.store.processes import id_order
from draftwood_memory.store.stored import Append, Entry, MemoryMetadata

_log = logging.getLogger(__name__)

_LISTED_SECONDS = 10.0
"""Minimum interval between updates of a memory's last use in the catalogue, which orders preloading and eviction."""
_USE_SECONDS = 600.0
"""Between two notes of which memories were used, if only to draft from: less than any memory's expiry."""
_SPACE_CHECK_SECONDS = 2.0
"""Interval between two searches for memories to delete in a full store. Each asks for the size of all memories."""


class Batch(NamedTuple):
    """Records of one memory that are written as one entry.

    Attributes:
        new_tokens: tokens of them that the memory in this process does not have yet.
    """

    name: MemoryName
    generation: int
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

    async def read(self, tag: str, generation: int) -> tuple[list[LoggedRecord], bytes]:
        """All records of a stream, and the id of its last entry."""
        logged: list[LoggedRecord] = []
        position = b"0-0"
        while found := await self._memories.read(tag, generation, position):
            logged += self.decoded(tag, generation, found)
            position = found[-1][0]
            if len(found) < PAGE:
                break
        return logged, position

    def decoded(
        self, tag: str, generation: int, found: Iterable[Entry], others_only: bool = False
    ) -> list[LoggedRecord]:
        """The records of entries; of other processes only, or of all. What cannot be decoded is logged and counted."""
        logged: list[LoggedRecord] = []
        for id_, value in found:
            try:
                writer, records = self._process.codec.decode(tag, generation, value)
            except CorruptValueError as error:
                self._process.counters.unreadable += 1
                _log.error("entry %s of memory %s cannot be read: %s", id_.decode(), tag, error)
                continue
            if not (others_only and writer == self._process.id):
                stored_at = id_order(id_)[0] // 1000  # by the store's clock: no record is younger than its entry is old
                logged += [
                    LoggedRecord(replace(one, learned_at=min(one.learned_at, stored_at)), id_) for one in records
                ]
        return logged

    async def write(self, batches: SequenceOf[Batch]) -> list[tuple[bytes, MemoryMetadata] | MemoryStoreError]:
        """Writes entries, in one round trip; for each its id and what the store says of the memory, or its error."""
        await self.note_use([self._process.naming.tag(one.name) for one in batches])
        answers = await self._memories.append([*map(self._append_of, batches)])
        if any(isinstance(answer, StoreFullError) for answer in answers):
            await self.free_space(is_full=True)
        return answers

    async def append(
        self,
        name: MemoryName,
        generation: int,
        records: SequenceOf[Record],
        on_stored: Callable[[list[Record], bytes], None] | None = None,
    ) -> MemoryMetadata:
        """Writes records to a memory at once, as an import does; what the store says of it then.

        Args:
            on_stored: adds the records of an entry, with its id, to the memory in this process; None if that has them.

        Raises:
            MemoryStoreError: those are written that `on_stored` was called with; without it, some may be.
        """
        metadata = MemoryMetadata(generation, True, False, None)
        await self.free_space()  # an import can fill a store faster than the checks come
        for some in batched(records):
            new_tokens = 0 if on_stored is None else sum(record.tokens.size for record in some)
            batch = Batch(name, generation, some, new_tokens)
            [answer] = await self.write([batch])
            if isinstance(answer, StoreFullError):  # some may be free now
                [answer] = await self.write([batch])
            if isinstance(answer, MemoryStoreError):
                raise answer
            id_, metadata = answer
            if metadata.generation != generation:
                await self._memories.unlink(self._process.naming.tag(name), generation)
                break
            if on_stored is not None:
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

    async def renew(self, name: MemoryName, generation: int) -> None:
        """A memory is used: renews its expiry in the store."""
        config = self._process.residents.config_of(name)
        if not config.stored_seconds and config.orphan_ttl:
            await self._memories.renew(self._process.naming.tag(name), generation, config.orphan_ttl)

    async def renew_used(self) -> None:
        """Memories that are only drafted from count as used, too."""
        now = time.monotonic()
        if now - self._used_at < _USE_SECONDS:
            return
        used = [one for one in self._process.residents.all() if one.loaded and one.used_at >= self._used_at]
        await self.note_use([one.tag for one in used])
        for one in used:
            await self.renew(one.name, one.generation or 0)
        await self._memories.forget_listed(self._process.naming.fingerprint)
        self._used_at = now

    def _append_of(self, batch: Batch) -> Append:
        tag, resident = self._process.naming.tag(batch.name), self._process.residents.get(batch.name)
        log = resident.log if resident is not None and resident.loaded else None
        config = self._process.residents.config_of(batch.name)
        return Append(
            tag=tag,
            generation=batch.generation,
            name=self._process.codec.encode_name(tag, batch.name),
            value=self._process.codec.encode(tag, batch.generation, self._process.id, batch.records),
            first_id=None if resident is None else resident.first_id(),
            max_bytes=config.bytes,
            expiry=config.expiry,
            tokens=None if log is None else min(log.tokens + batch.new_tokens, config.tokens),
        )
