"""What every round of the memory thread does besides sending and reading: evicts, drops what is too old, notes use."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from draftwood_memory.errors import MemoryStoreError
from draftwood_memory.local.process import Process
from draftwood_memory.local.record_log import LoggedRecord
from draftwood_memory.local.resident import Resident
from draftwood_memory.replication.replica import Replica
from draftwood_memory.store.naming import MemoryName

_log = logging.getLogger(__name__)

_NOTE_SECONDS = 60.0
"""Between two notes of which kind of memories this process uses. Memories are orphans after an hour."""
_EVICT_SECONDS = 1.0
"""Between two evictions. It bounds how long surplus memories stay."""


class Maintenance:
    """Runs on the memory thread, but for `forget_if_lapsed`.

    Args:
        replica: None without a store.
    """

    def __init__(self, process: Process, replica: Replica | None) -> None:
        self._process = process
        self._residents = process.residents
        self._replica = replica
        self._forgot = False
        self._noted_at = self._evicted_at = -float("inf")

    async def run(self, failing: bool) -> None:
        """A round.

        Args:
            failing: the latest call to the store failed.
        """
        now = time.monotonic()
        replica = None if failing else self._replica
        self.forget_if_lapsed()
        for resident in self._residents.all():
            if self._replica is None and resident.unbuilt:
                self._fork(resident)
                resident.build([*resident.unbuilt])
            if resident.expired:
                resident.reset(resident.generation or 0, resident.purged_at)
                resident.loaded = self._replica is None
            elif resident.loaded and resident.drop_aged():
                resident.build([*resident.strategies], replace_empty=True)
                if replica is not None:
                    await self._trim(replica, resident)
        if now - self._evicted_at >= _EVICT_SECONDS or self._residents.too_many:
            self._evicted_at = now
            self._residents.evict(self._process.outbox.names())
        if replica is not None:
            with suppress(MemoryStoreError):
                await self._note(replica, now)

    def forget_if_lapsed(self) -> bool:
        """Whether the lease has lapsed: the store was unavailable until purges stopped waiting for this process.

        Then it forgets all records.
        """
        if self._replica is None or not self._replica.processes.lapsed:
            return False
        if not self._forgot:
            self._forgot = True
            for resident in self._residents.all():
                resident.reset(resident.generation, resident.purged_at)
            _log.warning("the store was away for a day: nothing is drafted from memories until it is back")
        return True

    def _fork(self, resident: Resident) -> None:
        """Without a store: copies the tenant's records to an arm's memory that is forked and empty."""
        base = self._residents.get(MemoryName(resident.name.tenant))
        empty = not resident.generation and not len(resident.log)
        if resident.forked and empty and base is not None and base is not resident:
            resident.replace_log([LoggedRecord(logged.record) for logged in base.log], b"0-0")

    async def _trim(self, replica: Replica, resident: Resident) -> None:
        if resident.config.max_age and not resident.newer:
            with suppress(MemoryStoreError):
                oldest = resident.config.oldest(self._process.clock.now())
                await replica.memories.trim(resident.tag, resident.generation or 0, oldest)

    async def _note(self, replica: Replica, now: float) -> None:
        self._forgot = False
        await replica.records.renew_used()
        if now - self._noted_at >= _NOTE_SECONDS:
            await replica.memories.catalogue.note_kind(self._process.naming.kind)
            self._noted_at = now
