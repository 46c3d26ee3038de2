"""One process's copy of the memories that it uses: loads them, and learns what others write to them.

Every method runs on the memory thread, and with `lock` if it uses memories. Whatever fails is done again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as SequenceOf
from contextlib import suppress

from draftwood_memory.errors import MemoryStoreError, StoreFullError, StoreUnavailableError, WrongTypeError
from draftwood_memory.records import LoggedRecord, Record
from draftwood_memory.resident import Resident
from draftwood_memory.residents import Process
from draftwood_memory.sender import RecordStore, Sender
from draftwood_memory.store.memories import EMPTY, Memories, entries_of
from draftwood_memory.store.naming import MemoryName, stream_key, tenant_part, wake_key
from draftwood_memory.store.purges import Purges, id_order
from draftwood_memory.store.stored import Entry, MemoryMetadata

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 30.0
"""Between two reads of a memory that the store cannot serve."""
_CHECKED = 500
"""Memories that are compared with the store's in one round trip."""
BLOCK_SECONDS = 2.0
"""Of a blocking read. It bounds how long a store that stopped without closing its connections goes unnoticed."""
_COLLECT_SECONDS, _COLLECT_STREAM_SECONDS = 0.01, 50e-6
"""Between two reads, and more for each stream, since a read names them all."""
_POLL_SECONDS, _POLL_STREAM_SECONDS = 0.05, 200e-6
"""The same on a cluster, where reads do not block."""
_READ_ENTRIES = 64
"""Of a stream in one read. It bounds the size of an answer."""
_WAKE_TTL = 60


class Replica:
    """Synchronizes the memories of this process with the store's, as far as a cache needs it.

    Attributes:
        lock: held while memories, or the store's, are changed.
        purges: those that this process and the others have seen.
        records: those in the store.
        sender: sends what this process learned.
    """

    def __init__(self, memories: Memories, process: Process) -> None:
        self.memories = memories
        self.purges = Purges(memories.client, process.id.hex())
        self.lock = asyncio.Lock()
        self.records = RecordStore(memories, process)
        self.sender = Sender(memories, self.records, process, self.apply_metadata, self.postpone)
        self._process = process
        self._residents, self._outbox, self._counters = process.residents, process.outbox, process.counters

    async def apply_purges(self) -> None:
        """Empties the memories that others have purged, and tells the store so; nothing if it did just now. Before
        anything is loaded, and every `SEE_SECONDS`. Raises MemoryStoreError."""
        if not self.purges.due:
            return
        seen, parts = await self.purges.missed()
        while parts:
            await self.purged(parts)
            self.purges.applied(seen)
            seen, parts = await self.purges.missed()

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
        assert resident.epoch is not None
        if resident.loaded:
            entries = await self.memories.read(resident.tag, resident.epoch, resident.position)
            await self.apply_entries(resident, resident.epoch, entries)
            return
        with resident.lock:
            resident.learned_meanwhile = []
            unsent = [pending.logged for pending in self._outbox.of(resident.name)]
        try:
            logged, position = await self.records.read(resident.tag, resident.epoch)
            if not logged and resident.forked:
                logged, position = await self._fork(resident), b"0-0"
        except BaseException:
            resident.learned_meanwhile = None
            raise
        resident.replace_log([*logged, *unsent], position)
        resident.problem = ""
        if logged:
            await self.records.note_use([resident.tag])
            await self.records.renew(resident.name, resident.epoch)
        resident.build([*resident.strategies])

    async def apply_metadata(self, resident: Resident, metadata: MemoryMetadata) -> None:
        """Applies what the store says of a memory; a purge empties it. Raises MemoryStoreError."""
        known = resident.epoch
        if metadata.newer and not resident.newer:
            _log.warning("memory %s is of a newer version; it is read, not written", resident.tag)
        resident.newer = metadata.newer
        if known is not None and metadata.epoch < known:
            if not metadata.newer:
                await self.memories.restore_epoch(resident.tag, known, metadata.epoch)
            return
        if known == metadata.epoch:
            return
        purged_at = None if metadata.purged_since is None else time.monotonic() - metadata.purged_since
        if known is not None or purged_at is not None:
            resident.reset(metadata.epoch, purged_at)
        resident.epoch = metadata.epoch
        self._counters.stale += self._outbox.discard(
            resident.name, lambda pending: not resident.is_current(pending.epoch, pending.began)
        )

    async def apply_entries(self, resident: Resident, epoch: int, read: SequenceOf[Entry]) -> None:
        """Learns entries that were read after `resident.position` in an epoch."""
        entries = [entry for entry in read if id_order(entry[0]) > id_order(resident.position)]
        if not entries or not resident.loaded or resident.epoch != epoch:
            return
        resident.position = entries[-1][0]
        logged = self.records.decoded(resident.tag, epoch, entries, others_only=True)
        with resident.lock:
            for held in logged:
                resident.add(held)
        self._counters.received += len(logged)
        self._process.between_steps.learn_later(resident, [held.record for held in logged])

    async def check(self, live_only: bool) -> None:
        """Compares memories with the store's, which may have lost something. Raises MemoryStoreError.

        A memory that alone cannot be read is read again later.
        """
        residents = [resident for resident in self._residents.all() if resident.live or not live_only]
        for start in range(0, len(residents), _CHECKED):
            some = residents[start : start + _CHECKED]
            for resident, metadata in zip(
                some, await self.memories.metadata_of([resident.tag for resident in some]), strict=True
            ):
                if isinstance(metadata, MemoryStoreError):
                    self.postpone(resident, metadata)
                    continue
                await self.apply_metadata(resident, metadata)
                if not metadata.exists and resident.loaded and len(resident.log):
                    with suppress(StoreFullError):  # what fits goes on, and this one is tried again in the next check
                        await self._restore(resident)
            some = [resident for resident in some if resident.loaded]
            ids = await self.memories.last_ids([(resident.tag, resident.epoch or 0) for resident in some])
            for resident, last in zip(some, ids, strict=True):
                if isinstance(last, MemoryStoreError):
                    self.postpone(resident, last)
                elif id_order(last) < id_order(resident.position):
                    resident.position = last
                    self._counters.reloads += last != EMPTY  # it may have been evicted from the store, or be too old

    async def purged(self, parts: frozenset[str]) -> None:
        """Some tenants, by their names in keys, were purged. Raises MemoryStoreError."""
        some = [resident for resident in self._residents.all() if tenant_part(resident.tag) in parts]
        for resident, metadata in zip(
            some, await self.memories.metadata_of([resident.tag for resident in some]), strict=True
        ):
            if isinstance(metadata, StoreUnavailableError):
                raise metadata  # it may hold what was purged
            if isinstance(metadata, MemoryMetadata):
                await self.apply_metadata(resident, metadata)

    async def stored(self, name: MemoryName) -> tuple[MemoryMetadata, list[Record]]:
        """What the store says of a memory and the records that it and the outbox hold. Raises MemoryStoreError."""
        tag = self._process.naming.tag(name)
        metadata = await self.memories.metadata(tag)
        logged, _ = await self.records.read(tag, metadata.epoch)
        unsent = [
            pending.logged for pending in self._outbox.of(name) if metadata.is_current(pending.epoch, pending.began)
        ]
        return metadata, [held.record for held in (*logged, *unsent)]

    def postpone(self, resident: Resident, error: MemoryStoreError) -> None:
        """A memory cannot be read; others can. What is known of it stays in use."""
        resident.loaded, resident.retry_at = False, time.monotonic() + _RETRY_SECONDS
        if resident.problem != str(error):
            resident.problem = str(error)
            _log.error("memory %s cannot be read: %s", resident.tag, error)

    async def _fork(self, resident: Resident) -> list[LoggedRecord]:
        """The records of the tenant's memory, which an arm's begins with, if no process has begun it before."""
        if resident.newer:
            return []
        _, records = await self.stored(MemoryName(resident.name.tenant))
        begun = records and await self.records.begin(resident.name, resident.epoch or 0, records)
        return [LoggedRecord(record) for record in records] if begun else []

    async def _restore(self, resident: Resident) -> None:
        """Writes a memory that the store has lost; one of the processes that have it does."""
        unsent = {id(pending.logged) for pending in self._outbox.of(resident.name)}
        records = [logged.record for logged in resident.log if id(logged) not in unsent]
        if not records:
            return
        if not await self.records.begin(resident.name, resident.epoch or 0, records):
            resident.loaded = False  # another process did
            return
        self._counters.restored += 1
        _log.warning("memory %s restored to a store that had lost it", resident.tag)


class Follower:
    """Runs on the memory thread. Every method that waits may raise MemoryStoreError.

    Attributes:
        reading: it waits in a blocking read.
    """

    def __init__(self, replica: Replica, process: Process) -> None:
        self.reading = False
        self._replica = replica
        self._residents = process.residents
        self._wake_key = wake_key(process.id.hex())
        self._woken = b"0-0"
        self._followed: frozenset[Resident] = frozenset()
        self._client = replica.memories.client.with_longer_timeout(BLOCK_SECONDS)

    async def close(self) -> None:
        await self._client.close()

    async def wake(self) -> None:
        """Ends a read that lacks memories which came into use since it began."""
        if self.reading and not self._live() <= self._followed:
            self.reading = False
            wake = ("XADD", self._wake_key, "MAXLEN", 1, "*", "w", 1), ("EXPIRE", self._wake_key, _WAKE_TTL)
            await self._replica.memories.client.commands(wake)

    async def follow(self) -> None:
        """One read of the streams that are live here; what they hold is learned."""
        self._followed = self._live()
        try:
            await self._read()
        except WrongTypeError:
            async with self._replica.lock:
                await self._replica.check(live_only=True)
            if self._followed <= self._live():  # none of them was postponed
                raise

    async def _read(self) -> None:
        streams = {
            stream_key(resident.tag, resident.epoch or 0): (resident, resident.epoch or 0)
            for resident in self._followed
        }
        after = {key: resident.position for key, (resident, _) in streams.items()}
        if self._client.is_cluster:
            commands = [("XRANGE", key, b"(" + id_, "+", "COUNT", _READ_ENTRIES) for key, id_ in after.items()]
            answers = await self._client.results(commands, of_keys=True)
            read = {key: answer for key, answer in zip(after, answers, strict=True) if answer}
            pause = _POLL_SECONDS + _POLL_STREAM_SECONDS * len(after)
        else:
            self.reading = True
            after[self._wake_key] = self._woken
            block = ("COUNT", _READ_ENTRIES, "BLOCK", round(1000 * BLOCK_SECONDS))
            try:
                answer = await self._client.command("XREAD", *block, "STREAMS", *after, *after.values())
            finally:
                self.reading = False
            read = {key.decode(): entries for key, entries in answer or ()}
            pause = _COLLECT_SECONDS + _COLLECT_STREAM_SECONDS * len(after) if read.keys() - {self._wake_key} else 0.0
        async with self._replica.lock:
            for key, entries in read.items():
                if isinstance(entries, MemoryStoreError):
                    self._replica.postpone(streams[key][0], entries)
                elif key in streams:
                    resident, epoch = streams[key]
                    await self._replica.apply_entries(resident, epoch, entries_of(entries))
                else:
                    self._woken = entries[-1][0]
        await asyncio.sleep(pause)

    def _live(self) -> frozenset[Resident]:
        """Those that learn what was read last are read on after that."""
        return frozenset(resident for resident in self._residents.all() if resident.live and not resident.learns)
