"""One process's copy of the memories that it uses: loads them, and learns what others write to them.

Every method runs on the memory thread, and with `lock` if it uses memories. Whatever fails is done again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as SequenceOf
from contextlib import suppress

from draftwood_memory.errors import MemoryStoreError, StoreFullError, StoreUnavailableError
from draftwood_memory.local.process import Process
from draftwood_memory.local.record_log import LoggedRecord
from draftwood_memory.local.resident import Resident
from draftwood_memory.records import Record
from draftwood_memory.replication.record_store import RecordStore
from draftwood_memory.replication.sender import Sender
from draftwood_memory.store.memories import EMPTY, Memories
from draftwood_memory.store.naming import MemoryName, tenant_part
from draftwood_memory.store.processes import RENEW_SECONDS, Processes, id_order
from draftwood_memory.store.stored import Entry, MemoryMetadata

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 30.0
"""Between two reads of a memory that the store cannot serve."""
_RESTORE_SECONDS = 1.0
"""For the process that restores a lost memory to write it, before the others load it."""
_CHECKED = 500
"""Memories that are compared with the store's in one round trip."""


class Replica:
    """Synchronizes the memories of this process with the store's, as far as a cache needs it.

    Attributes:
        lock: held while memories, or the store's, are changed.
        processes: the others that use the store, and which purges they have applied.
        records: those in the store.
        sender: sends what this process learned.
    """

    def __init__(self, memories: Memories, process: Process) -> None:
        self.memories = memories
        self.processes = Processes(memories.client, memories.clock, process.id.hex())
        self.lock = asyncio.Lock()
        self.records = RecordStore(memories, process)
        self.sender = Sender(memories, self.records, process, self.apply_metadata, self.postpone)
        self._process = process
        self._residents, self._outbox, self._counters = process.residents, process.outbox, process.counters
        self._joined = False
        self._claimed = set[tuple[str, int]]()

    async def join(self) -> None:
        """Renews the lease by which purges wait for this process. Before anything is loaded, and in every round."""
        if not self._joined:
            await self.processes.apply(await self.processes.latest())
            self._joined = True
        elif time.monotonic() - self.processes.reached_at > RENEW_SECONDS:
            await self.apply_purges()

    async def apply_purges(self) -> None:
        """Empties the memories that others have purged, and acknowledges it in the store. Raises MemoryStoreError."""
        latest, parts = await self.processes.missed()
        if parts:
            await self.purged(parts)
        await self.processes.apply(latest)

    async def load(self) -> None:
        """Reads memories and builds strategies that are new in this process. Raises StoreUnavailableError."""
        for resident in self._residents.all():
            if not resident.loaded and resident.retry_at < time.monotonic():
                try:
                    await self.refresh(resident)
                except MemoryStoreError as error:
                    if isinstance(error, StoreUnavailableError) and not self.memories.client.is_cluster:
                        raise
                    self.postpone(resident, error)
            elif resident.loaded and resident.unbuilt:
                resident.build([*resident.unbuilt])

    async def refresh(self, resident: Resident) -> None:
        """Reads a memory up to the store's latest entry, and builds its strategies. Raises MemoryStoreError."""
        await self.apply_metadata(resident, await self.memories.metadata(resident.tag))
        assert resident.generation is not None
        if resident.loaded:
            found = await self.memories.read(resident.tag, resident.generation, resident.position)
            await self.apply_entries(resident, resident.generation, found)
            return
        with resident.lock:
            resident.learned_meanwhile = []
            unsent = [one.logged for one in self._outbox.of(resident.name)]
        try:
            logged, position = await self.records.read(resident.tag, resident.generation)
            if not logged and resident.forked:
                logged, position = await self._fork(resident), b"0-0"
        except BaseException:
            resident.learned_meanwhile = None
            raise
        resident.replace_log([*logged, *unsent], position)
        resident.problem = ""
        if logged:
            await self.records.note_use([resident.tag])
            await self.records.renew(resident.name, resident.generation)
        resident.build([*resident.strategies])

    async def apply_metadata(self, resident: Resident, metadata: MemoryMetadata) -> None:
        """Applies what the store says of a memory; a purge empties it. Raises MemoryStoreError."""
        known = resident.generation
        if metadata.newer and not resident.newer:
            _log.warning("memory %s is of a newer version; it is read, not written", resident.tag)
        resident.newer = metadata.newer
        if known is not None and metadata.generation < known:
            if not metadata.newer:
                await self.memories.restore_generation(resident.tag, known, metadata.generation)
            return
        if known == metadata.generation:
            return
        purged_at = None if metadata.purged_since is None else time.monotonic() - metadata.purged_since
        if known is not None or purged_at is not None:
            resident.reset(metadata.generation, purged_at)
        resident.generation = metadata.generation
        self._counters.stale += self._outbox.discard(
            resident.name, lambda one: not resident.is_current(one.generation, one.began)
        )

    async def apply_entries(self, resident: Resident, generation: int, found: SequenceOf[Entry]) -> None:
        """Learns entries that were read after `resident.position` in a generation."""
        found = [one for one in found if id_order(one[0]) > id_order(resident.position)]
        if not found or not resident.loaded or resident.generation != generation:
            return
        resident.position = found[-1][0]
        logged = self.records.decoded(resident.tag, generation, found, others_only=True)
        with resident.lock:
            for one in logged:
                resident.add(one)
        self._counters.received += len(logged)
        self._process.between_steps.learn_later(resident, [one.record for one in logged])

    async def check(self, live_only: bool) -> None:
        """Compares memories with the store's, which may have lost something. Raises MemoryStoreError.

        A memory that alone cannot be read is read again later.
        """
        residents = [one for one in self._residents.all() if one.live or not live_only]
        for start in range(0, len(residents), _CHECKED):
            some = residents[start : start + _CHECKED]
            for resident, metadata in zip(
                some, await self.memories.metadata_of([one.tag for one in some]), strict=True
            ):
                if isinstance(metadata, MemoryStoreError):
                    self.postpone(resident, metadata)
                    continue
                await self.apply_metadata(resident, metadata)
                if not metadata.exists and resident.loaded and len(resident.log):
                    with suppress(StoreFullError):  # what fits goes on, and this one is tried again in the next check
                        await self._restore(resident)
            some = [one for one in some if one.loaded]
            ids = await self.memories.last_ids([(one.tag, one.generation or 0) for one in some])
            for resident, last in zip(some, ids, strict=True):
                if isinstance(last, MemoryStoreError):
                    self.postpone(resident, last)
                elif id_order(last) < id_order(resident.position):
                    resident.position = last
                    self._counters.reloads += last != EMPTY  # it may have been evicted from the store, or be too old

    async def purged(self, parts: frozenset[str]) -> None:
        """Some tenants, by their names in keys, were purged. Raises MemoryStoreError."""
        some = [one for one in self._residents.all() if tenant_part(one.tag) in parts]
        for resident, metadata in zip(some, await self.memories.metadata_of([one.tag for one in some]), strict=True):
            if isinstance(metadata, StoreUnavailableError):
                raise metadata  # it may hold what was purged
            if isinstance(metadata, MemoryMetadata):
                await self.apply_metadata(resident, metadata)

    async def stored(self, name: MemoryName) -> tuple[MemoryMetadata, list[Record]]:
        """What the store says of a memory and the records that it and the outbox hold. Raises MemoryStoreError."""
        tag = self._process.naming.tag(name)
        metadata = await self.memories.metadata(tag)
        logged, _ = await self.records.read(tag, metadata.generation)
        unsent = [one.logged for one in self._outbox.of(name) if metadata.is_current(one.generation, one.began)]
        return metadata, [one.record for one in (*logged, *unsent)]

    def postpone(self, resident: Resident, error: MemoryStoreError) -> None:
        """A memory cannot be read; others can. What is known of it stays in use."""
        resident.loaded, resident.retry_at = False, time.monotonic() + _RETRY_SECONDS
        if resident.problem != str(error):
            resident.problem = str(error)
            _log.error("memory %s cannot be read: %s", resident.tag, error)

    async def _fork(self, resident: Resident) -> list[LoggedRecord]:
        """The records of the tenant's memory, which an arm's begins with, if no process has begun it before."""
        if resident.newer or not await self._claim(resident):
            return []
        _, records = await self.stored(MemoryName(resident.name.tenant))
        await self._begin(resident, records)
        return [LoggedRecord(record) for record in records]

    async def _restore(self, resident: Resident) -> None:
        """Writes a memory that the store has lost; one of the processes that have it does."""
        unsent = {id(one.logged) for one in self._outbox.of(resident.name)}
        records = [logged.record for logged in resident.log if id(logged) not in unsent]
        if not records:
            return
        if not await self._claim(resident):
            resident.loaded, resident.retry_at = False, time.monotonic() + _RESTORE_SECONDS
            return
        await self._begin(resident, records)
        self._counters.restored += 1
        _log.warning("memory %s restored to a store that had lost it", resident.tag)

    async def _claim(self, resident: Resident) -> bool:
        """Whether this process may write a memory's first records: it has the claim, now or since a failed attempt."""
        assert resident.generation is not None
        claim = resident.tag, resident.generation
        if claim not in self._claimed:
            try:
                claimed = await self.memories.claim(resident.tag)
            except StoreFullError:
                await self.records.free_space(is_full=True)
                claimed = await self.memories.claim(resident.tag)
            if claimed:
                self._claimed.add(claim)
        return claim in self._claimed

    async def _begin(self, resident: Resident, records: SequenceOf[Record]) -> None:
        """Writes the first records of a memory that this process has claimed."""
        assert resident.generation is not None
        await self.records.append(resident.name, resident.generation, records)
        self._claimed.discard((resident.tag, resident.generation))
