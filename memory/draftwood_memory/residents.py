"""The memories in this process, and which of them are evicted."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from draftwood_memory.config import MemoryConfig, MemoryOverrides, surplus
from draftwood_memory.counters import MemoryCounters
from draftwood_memory.records import Codec, Outbox
from draftwood_memory.resident import BetweenSteps, Resident
from draftwood_memory.store.naming import MemoryName, Naming
from draftwood_memory.store.stored import StoreClock

_WAITED_SECONDS = 1.0
"""Seconds after a request for which a memory that is being loaded is not evicted. Requests wait 50 ms."""


class Residents:
    """The memories in this process, the latest used last. Safe to call from any thread.

    Args:
        config: of the memories in this process; of more, some are evicted, see `config.surplus`.
        stored: there is a store to load evicted memories from.

    Attributes:
        evicted: how many memories were evicted.
    """

    def __init__(self, naming: Naming, config: MemoryConfig, clock: StoreClock, stored: bool) -> None:
        self.config = config
        self._clock = clock
        self.evicted = 0
        self._naming = naming
        self._stored = stored
        self._overrides: dict[MemoryName, MemoryOverrides] = {}
        self._lock = threading.Lock()
        self._by_name: OrderedDict[MemoryName, Resident] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def too_many(self) -> bool:
        """More than there may be."""
        return len(self) > self.config.max_resident

    def __contains__(self, name: MemoryName) -> bool:
        return name in self._by_name

    def all(self) -> list[Resident]:
        with self._lock:
            return [*self._by_name.values()]

    def get(self, name: MemoryName) -> Resident | None:
        return self._by_name.get(name)

    def open(self, name: MemoryName, overrides: MemoryOverrides | None = None) -> Resident:
        """A memory, marked as used now; a new one is added without any records.

        Args:
            overrides: of a request; None leaves a memory's as they are, those from before it was evicted, too.
        """
        with self._lock:
            resident = self._by_name.get(name)
            if resident is None:
                resident = Resident(name, self._naming.tag(name), self.config, self._clock, loaded=not self._stored)
                self._by_name[name] = resident
            resident.used_at = time.monotonic()
            self._by_name.move_to_end(name)
        if overrides == MemoryOverrides():
            self._overrides.pop(name, None)
        elif overrides is not None:
            self._overrides[name] = overrides
        resident.reconfigure(self.config_of(name), self._overrides.get(name, MemoryOverrides()).forked)
        return resident

    def config_of(self, name: MemoryName) -> MemoryConfig:
        """The limits of a memory, in this process or not."""
        return self.config.under(self._overrides.get(name, MemoryOverrides()))

    def pin(self, name: MemoryName, overrides: MemoryOverrides | None = None) -> Resident:
        """As `open`; the memory is not evicted until `unpin`."""
        resident = self.open(name, overrides)
        with self._lock:
            resident.pins += 1
        return resident

    def unpin(self, resident: Resident) -> None:
        with self._lock:
            resident.pins -= 1
            resident.used_at = time.monotonic()

    def evict(self, unsent: frozenset[MemoryName]) -> None:
        """Evicts idle memories, and of tenants with more than their share the least recently used until all fit.

        Those that requests use or wait for stay, and the one that was used last, however large it is.

        Args:
            unsent: memories with records that the store does not have yet. They are not evicted for being idle: the
                outbox keeps these records, but until the store answers, the memory cannot be loaded again.
        """
        now = time.monotonic()
        kept = {
            resident
            for resident in self.all()
            if resident.pins or (resident.unbuilt and now - resident.used_at < _WAITED_SECONDS)
        }
        for resident in {*self.all()} - kept:
            can_return = self._stored and resident.loaded and not resident.unbuilt and resident.name not in unsent
            if can_return and now - resident.used_at > self.config.idle_seconds:
                self._remove(resident)
        counts = [(resident, resident.name.tenant, 1) for resident in self.all()]
        for resident in surplus(counts, self.config.max_resident, kept.__contains__):
            self._remove(resident)
        sizes = [(resident, resident.name.tenant, resident.nbytes) for resident in self.all()]
        kept |= {resident for resident, _, _ in sizes[-1:]}
        for resident in surplus(sizes, self.config.max_bytes, kept.__contains__):
            self._remove(resident)

    def _remove(self, resident: Resident) -> None:
        with self._lock:
            if not resident.pins:  # else a request has begun to use it
                del self._by_name[resident.name]
                self.evicted += 1


@dataclass(frozen=True, slots=True)
class Process:
    """The memories of one model in this process, and what names, encodes and counts them.

    Attributes:
        id: identifies this process in the store, `WRITER_BYTES` bytes.
        between_steps: where strategies learn.
    """

    id: bytes
    naming: Naming
    codec: Codec
    clock: StoreClock
    residents: Residents
    outbox: Outbox
    counters: MemoryCounters
    between_steps: BetweenSteps
