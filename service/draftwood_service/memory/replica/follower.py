"""Follows the store: reads what other processes appended, and resolves differences between the two copies.

The store's copy decides. If its chain does not continue this process's, the memory is read again from the start;
records of this process that the store lost are sent again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TypeAlias

import structlog

from draftwood_service.memory.codec import Record
from draftwood_service.memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_service.memory.naming import MemoryName
from draftwood_service.memory.replica.counters import MemoryCounters
from draftwood_service.memory.replica.folder import Folder
from draftwood_service.memory.replica.instances import rebuild
from draftwood_service.memory.replica.outbox import Outbox
from draftwood_service.memory.replica.page_reader import PageReader
from draftwood_service.memory.replica.residents import HOT_SECONDS, Resident, Residents
from draftwood_service.memory.replica.tenant_log import TenantLog
from draftwood_service.memory.store.base import MemoryStore, Page, ReadRequest

_log = structlog.get_logger(__name__)

CHECK_SECONDS = 10.0
"""A memory in use is compared with the store's at least so often, in case an announcement was lost. Not tuned."""
_RETRY_SECONDS = 30.0
"""Between two reads of a memory that the store cannot serve. Not tuned."""
_BATCH_MEMORIES = 64
"""Memories per round trip; bounds the size of one answer. Not tuned."""
_MAX_REFRESH_READS = 8
"""Reads of one memory in a row while other processes change it. Not tuned: two are usually enough."""
_EVICT_SHARE = 16
"""Memories are evicted each time this part of the bound on their bytes was loaded, so that a round that loads many
exceeds it by no more. Not tuned."""
_EXPIRY_SECONDS = 0.05
"""Tolerance for the difference of the two clocks when a memory's time to live ends. Not tuned."""

LearnRecords: TypeAlias = Callable[[Resident, SequenceOf[Record]], Awaitable[None]]
"""Lets the published strategies of a memory learn records, on the thread that they belong to."""


class Follower:
    """Keeps the logs of this process's memories equal to the store's.

    Attributes:
        check_all: compare every memory in the next round, since writes may have been missed.
    """

    def __init__(
        self,
        store: MemoryStore,
        residents: Residents,
        outbox: Outbox,
        reader: PageReader,
        folder: Folder,
        learn: LearnRecords,
        counters: MemoryCounters,
    ) -> None:
        self._store = store
        self._residents = residents
        self._outbox = outbox
        self._reader = reader
        self._folder = folder
        self._learn = learn
        self._counters = counters
        self._last_write = 0
        self.check_all = False

    async def load(self) -> None:
        """Reads memories and builds strategies that are new in this process. Raises StoreUnavailableError."""
        now = time.monotonic()
        loaded_bytes = 0
        for resident in self._residents.all():
            if not resident.loaded and resident.retry_at < now:
                await self._try_refresh(resident)
                loaded_bytes += resident.nbytes
                if loaded_bytes > self._residents.max_bytes // _EVICT_SHARE:
                    loaded_bytes = 0
                    self._residents.evict(frozenset(self._outbox.pending_memories()))
            elif resident.loaded:
                self._build_new(resident)

    async def follow(self) -> None:
        """Reads the memories that were written to, and those in use that were not compared for a while.

        Raises:
            MemoryStoreError: the store failed.
        """
        now = time.monotonic()
        if self._store.shared:
            await self._see_activity(now)
        due = [resident for resident in self._residents.all() if resident.loaded and self._is_due(resident, now)]
        self.check_all = False
        for start in range(0, len(due), _BATCH_MEMORIES):
            if start:
                await self.load()  # a first request waits for one batch, not for all of them
            batch = due[start : start + _BATCH_MEMORIES]
            requests = [ReadRequest(one.tag, one.log.position, self._outbox.source) for one in batch]
            for resident, request, page in zip(batch, requests, await self._store.read(requests), strict=True):
                if isinstance(page, StoreUnavailableError):
                    raise page
                if isinstance(page, Page):
                    await self._take(resident, page, request.position)
                if isinstance(page, MemoryStoreError) or not resident.loaded:
                    await self._try_refresh(resident)

    async def refresh(self, resident: Resident) -> None:
        """Reads one memory up to the store's latest record. Raises MemoryStoreError."""
        for _ in range(_MAX_REFRESH_READS):
            position = resident.log.position if resident.loaded else 0
            [page] = await self._store.read([ReadRequest(resident.tag, position, self._outbox.source)])
            if isinstance(page, MemoryStoreError):
                raise page
            await self._take(resident, page, position)
            if resident.loaded:
                break
        self._build_new(resident)

    async def _try_refresh(self, resident: Resident) -> None:
        """A memory that the store cannot serve does not keep the others from being served."""
        try:
            await self.refresh(resident)
        except StoreUnavailableError:
            raise
        except MemoryStoreError as error:
            resident.retry_at = time.monotonic() + _RETRY_SECONDS
            _log.error("memory cannot be read", memory=resident.tag, why=str(error))

    async def _see_activity(self, now: float) -> None:
        last_write, tags = await self._store.activity(self._last_write)
        if last_write < self._last_write:
            self.check_all = True  # the store lost its latest writes, perhaps also those of memories
        self._last_write = last_write
        for tag in tags:
            if (resident := self._residents.by_tag(tag)) is not None:
                resident.hot_until = now + HOT_SECONDS

    def _is_due(self, resident: Resident, now: float) -> bool:
        if self.check_all or now < resident.hot_until:
            return True
        in_use = resident.used_at > resident.checked_at
        return self._store.shared and in_use and now - resident.checked_at > CHECK_SECONDS

    async def _take(self, resident: Resident, page: Page, asked: int) -> None:
        """Applies a page read after the position `asked`. Unsets `loaded` if the memory must be read from the start."""
        now = resident.checked_at = time.monotonic()
        known = resident.epoch
        if page.newer and not resident.newer:
            _log.warning(
                "memory is of a newer version; it is read as far as possible, not written", memory=resident.tag
            )
        resident.newer = page.newer
        if page.epoch is None:
            await self._take_nothing(resident)
            return
        if known is not None and page.epoch < known:
            # A failover restored records that had been purged.
            resident.loaded = False
            if page.newer:
                resident.retry_at = now + _RETRY_SECONDS  # until a server that may change it purges it again
            else:
                await self._store.purge(resident.tag, known, only_raise=True)
            return
        purged_at = None if page.since_purge is None else now - page.since_purge
        if known is not None and page.epoch > known:
            self._counters.purges += 1
            resident.reset(page.epoch, purged_at)
            self._counters.stale += self._outbox.settle(resident.name, page.epoch, page.since_purge)
            return
        with resident.lock:
            resident.epoch, resident.purged_at = page.epoch, purged_at
            resident.expires_at = None if page.expires_in is None else now + page.expires_in
        stale = self._outbox.settle(resident.name, page.epoch, page.since_purge)
        self._counters.stale += stale
        self._outbox.rewind(resident.name, page.mark)
        if resident.loaded and page.start == resident.log.position and page.before == resident.log.chain:
            await self._continue(resident, page)
        else:
            await self._start_over(resident, page, asked, stale > 0)
        resident.foldable &= not page.newer
        if page.snapshot_missing and resident.foldable and resident.loaded:
            resident.fold_due = True

    async def _take_nothing(self, resident: Resident) -> None:
        """The store has nothing of a memory: it is new, its time to live ended, or the store lost its data."""
        resident.loaded = True
        if resident.epoch is None:
            self._settle(resident, 0)
        if resident.log.position == 0:
            if resident.epoch:  # a purge that other processes may not have seen
                await self._store.purge(resident.tag, resident.epoch, only_raise=True)
            elif resident.forked and await self._fork(resident):
                return
            self._outbox.rewind(resident.name, 0)
            return
        if resident.expires_at is not None and time.monotonic() > resident.expires_at - _EXPIRY_SECONDS:
            resident.reset(resident.epoch or 0, resident.purged_at)
            resident.loaded = True
            self._outbox.forget(resident.name)
        elif resident.foldable and await self._folder.seed(resident):
            self._counters.seeds += 1
            _log.warning("memory restored to a store that had lost it", memory=resident.tag)
            self._outbox.rewind(resident.name, resident.log.marks.get(self._outbox.source, 0))
        else:
            resident.loaded = False
            if not resident.foldable:
                resident.reset(resident.epoch or 0, resident.purged_at)

    async def _fork(self, resident: Resident) -> bool:
        """Gives an arm's memory, of which the store has nothing, what its tenant's has; False if that is nothing.

        The first process that does so decides; every one, this one too, then reads what the store has.
        """
        origin = self._residents.open(MemoryName(resident.name.tenant))
        if origin is resident:
            return False
        if not origin.loaded:
            await self.refresh(origin)
        if not len(origin.log):
            return False
        # Under another source: numbers of this process's own records here are above those that it has sent elsewhere.
        source = secrets.token_hex(8)
        records = [replace(record, source=source, seq=seq) for seq, record in enumerate(origin.log, 1)]
        log = TenantLog(resident.capacity)
        log.restore(records, len(records), origin.log.chain)
        resident.log = log
        seeded = await self._folder.seed(resident)
        resident.log = TenantLog(resident.capacity)
        if not seeded:
            [page] = await self._store.read([ReadRequest(resident.tag, 0, self._outbox.source)])
            if isinstance(page, Page) and page.epoch is None:
                _log.warning("the store has no room for the memory of an arm; it begins empty", memory=resident.tag)
                return False
        resident.loaded = False
        return True

    def _settle(self, resident: Resident, epoch: int) -> None:
        with resident.lock:
            resident.epoch = epoch
        self._outbox.settle(resident.name, epoch, None)

    async def _continue(self, resident: Resident, page: Page) -> None:
        new = self._reader.append(resident, resident.log, page.values)
        others = [record for record in new if record.source != self._outbox.source]
        if others:
            self._counters.received += len(others)
            await self._learn(resident, others)
        if (resident.log.position, resident.log.chain) != (page.position, page.chain):
            resident.loaded = False

    async def _start_over(self, resident: Resident, page: Page, asked: int, was_purged: bool) -> None:
        """Replaces the log by the store's; `was_purged`: strategies learned records that a purge removed."""
        again = resident.loaded
        if again:
            self._counters.reloads += 1
            _log.info("memory reloaded", memory=resident.tag, ours=resident.log.position, stores=page.position)
        if asked and page.start == asked:
            resident.loaded = False  # the page does not start at the log's start
            return
        log = TenantLog(resident.capacity)
        resident.foldable = not page.newer
        records = await self._reader.snapshot_records(resident, page)
        if records is None:
            resident.loaded = False
            return
        log.restore(records, page.start, page.before)
        if page.start and page.snapshot is None:
            resident.foldable = False
        self._reader.append(resident, log, page.values)
        if (log.position, log.chain) != (page.position, page.chain):
            _log.error("log does not match its digest", memory=resident.tag, position=log.position)
            log.position, log.chain = page.position, page.chain
            resident.foldable = False
        resident.log = log
        resident.loaded = True
        resident.aged_at = 0.0
        resident.drop_aged()
        rebuild(resident, self._outbox, [*resident.strategies], again or was_purged)

    def _build_new(self, resident: Resident) -> None:
        aged = resident.drop_aged()
        if resident.resized:
            resident.resized = False
            resident.log.resize(resident.capacity)
            resident.fold_due = aged = True
        if aged:
            rebuild(resident, self._outbox, [*resident.strategies], replace_empty=True)
        elif resident.unbuilt:
            rebuild(resident, self._outbox, [*resident.unbuilt])
