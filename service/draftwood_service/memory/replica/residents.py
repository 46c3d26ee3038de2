"""The memories in this process: their logs, their strategy instances, and their eviction.

Threads: published strategies belong to the engine's thread; logs, epochs and positions to the memory thread. Each
resident's lock guards what requests read and write, and is held for microseconds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future

from draftwood_model_runner.request import MemoryTerms
from draftwood_service.memory.config import Capacity, MemoryConfig
from draftwood_service.memory.naming import MemoryName, Naming
from draftwood_service.memory.replica.instances import InstanceKey, make
from draftwood_service.memory.replica.tenant_log import TenantLog
from draftwood_service.memory.store.base import Appended, Limits
from draftwood_strategies import Strategy
from draftwood_strategies.draft import Int32Array

HOT_SECONDS = 1.5
"""How long a memory is read in every round after a write. It has to be longer than the time from a write's announcement
to its append, milliseconds; not tuned beyond that."""
_WAITED_SECONDS = 1.0
"""A memory that is not loaded stays so long for the request that asked for it, which waits 50 ms."""
_MOST_INSTANCES = 8
"""Of one memory: requests may name any strategy, and configurations change. Not tuned."""
_AGE_PARTS = 64
"""A record is dropped a 64th of the maximum age too late at most; each time, the strategies are rebuilt. Not tuned."""
_FOLD_ENTRIES = 256
_FOLD_SHARE = 4
"""A log is folded when it has this many entries beyond the snapshot, and a quarter of the snapshot's records: rewriting
the snapshot then costs at most five times the bytes that are appended. Not tuned."""


class Resident:
    """One memory in this process.

    Attributes:
        epoch: raised by each purge; None before the first answer of the store.
        log: the records that were read from the store.
        config: its limits.
        forked: while the store has nothing of it, it begins with what its tenant's memory has.
        resized: its capacity has changed, which log and instances do not follow yet.
        strategies: the instances that requests draft with, those used last at the end.
        loaded: `log` continues the store's log; otherwise it has to be read from the start.
        foldable: `log` has everything that the store had, so that a snapshot of it loses nothing.
        fold_due: a snapshot should be written.
        newer: a newer version wrote to it: nothing of it is written here.
        unbuilt: strategies without the log yet, each with the future that completes when it has it.
        learned_meanwhile: sequences learned while instances are being built; None while none are.
        pins: number of requests and operations that use it now.
        used_at, checked_at, purged_at, expires_at: on the clock of `time.monotonic`.
        aged_at: when its log was last searched for records that are too old, on the same clock.
        hot_until: until then it is read in every round.
        retry_at: until then it is not read, since the store could not serve it.
    """

    def __init__(self, name: MemoryName, tag: str, config: MemoryConfig) -> None:
        self.name = name
        self.tag = tag
        self.config = self._servers = config
        self.forked = self.resized = False
        self.lock = threading.Lock()
        self.epoch: int | None = None
        self.log = TenantLog(self.capacity)
        self.strategies: dict[InstanceKey, Strategy] = {}
        self.loaded = False
        self.foldable = True
        self.fold_due = False
        self.newer = False
        self.unbuilt: dict[InstanceKey, Future[None]] = {}
        self.learned_meanwhile: list[Int32Array] | None = None
        self.pins = 0
        self.used_at = time.monotonic()
        self.checked_at = self.aged_at = 0.0
        self.hot_until = 0.0
        self.retry_at = 0.0
        self.purged_at: float | None = None
        self.expires_at: float | None = None

    @property
    def capacity(self) -> Capacity:
        """Of its records."""
        return self.config.capacity

    @property
    def limits(self) -> Limits | None:
        """Its own that the store enforces; None for those of the server."""
        return None if self.config == self._servers else Limits(self.config.log_bytes, self.config.stored_seconds)

    @property
    def nbytes(self) -> int:
        """Bytes of its records and strategies."""
        return self.log.nbytes + self.index_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of its strategies, of those that report them."""
        return sum(int(getattr(strategy, "nbytes", 0)) for strategy in [*self.strategies.values()])

    def drop_aged(self) -> bool:
        """Drops the records of the log that are too old; returns whether there were any, which a fold then removes.

        Does nothing before a part of the maximum age has passed since the last time.
        """
        max_age = self.config.max_age
        if not max_age or time.monotonic() - self.aged_at < max_age / _AGE_PARTS:
            return False
        self.aged_at = time.monotonic()
        dropped = self.log.drop_older(self.config.oldest(time.time()))
        self.fold_due |= dropped
        return dropped

    def agree(self, config: MemoryConfig, forked: bool) -> None:
        """Takes over what a request's terms say."""
        with self.lock:
            self.forked = forked
            self.resized |= config.capacity != self.capacity
            self.config = config

    def instance(self, key: InstanceKey) -> tuple[Strategy, Future[None] | None]:
        """The instance of a strategy, and the future that completes when it has learned the log; None if it has.

        Of more than `_MOST_INSTANCES` the one used longest ago is dropped; sequences that use it keep it.

        Raises:
            UnknownStrategyError: no strategy has this name.
            ValueError, TypeError: it does not accept the options.
        """
        with self.lock:
            self.used_at = time.monotonic()
            strategy = self.strategies.pop(key, None)
            if strategy is None:
                strategy = make(key, self.capacity)
                self.unbuilt[key] = Future()
            self.strategies[key] = strategy
            oldest = next(iter(self.strategies))
            dropped = None
            if len(self.strategies) > _MOST_INSTANCES:
                del self.strategies[oldest]
                dropped = self.unbuilt.pop(oldest, None)
            loading = self.unbuilt.get(key)
        if dropped is not None:
            dropped.set_result(None)
        return strategy, loading

    def is_current(self, epoch: int | None, since: float) -> bool:
        """Whether no purge came after a request that started at `since`, in `epoch` if that was known then."""
        if epoch is not None:
            return epoch == self.epoch
        return self.purged_at is None or since > self.purged_at

    def reset(self, epoch: int, purged_at: float | None) -> None:
        """Drops all records and starts the epoch `epoch`. Live requests keep the strategies that they have."""
        fresh = {key: make(key, self.capacity) for key in [*self.strategies]}
        with self.lock:
            self.epoch, self.purged_at = epoch, purged_at
            self.log = TenantLog(self.capacity)
            self.strategies.update(fresh)
            self.learned_meanwhile = None
            self.loaded, self.foldable, self.fold_due = False, True, False

    def note_append(self, result: Appended) -> None:
        """This process appended to the store's log: it is to be read in the next rounds, and folded if it is long."""
        self.hot_until = time.monotonic() + HOT_SECONDS
        self.fold_due |= result.unfolded >= max(_FOLD_ENTRIES, result.folded // _FOLD_SHARE)


class Residents:
    """The memories in this process, the latest used last. Safe to call from any thread.

    Args:
        limits: of the memories in this process; of more, the least recently used are evicted.

    Attributes:
        evicted: how many memories were evicted.
    """

    def __init__(self, naming: Naming, limits: MemoryConfig) -> None:
        self._naming = naming
        self._limits = limits
        self._max_resident = limits.max_resident
        self._max_bytes = limits.max_bytes
        self._idle_seconds = limits.idle_seconds
        self.evicted = 0
        self._terms: dict[MemoryName, MemoryTerms] = {}
        self._lock = threading.Lock()
        self._by_name: OrderedDict[MemoryName, Resident] = OrderedDict()
        self._by_tag: dict[str, Resident] = {}

    @property
    def max_bytes(self) -> int:
        """Of all memories together."""
        return self._max_bytes

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: MemoryName) -> bool:
        return name in self._by_name

    def all(self) -> list[Resident]:
        with self._lock:
            return [*self._by_name.values()]

    def get(self, name: MemoryName) -> Resident | None:
        return self._by_name.get(name)

    def by_tag(self, tag: str) -> Resident | None:
        return self._by_tag.get(tag)

    def open(self, name: MemoryName, terms: MemoryTerms | None = None) -> Resident:
        """A memory, marked as used now; a new one is added without any records.

        Args:
            terms: of a request; None leaves a memory's as they are, those from before it was evicted, too.
        """
        with self._lock:
            resident = self._by_name.get(name)
            if resident is None:
                resident = Resident(name, self._naming.tag(name), self._limits)
                self._by_name[name] = self._by_tag[resident.tag] = resident
            self._by_name.move_to_end(name)
        if terms is not None:
            if terms == MemoryTerms():
                self._terms.pop(name, None)
            else:
                self._terms[name] = terms
        known = self._terms.get(name)
        if terms is not None or known is not None:
            resident.agree(self._limits.under(known or MemoryTerms()), known is not None and known.forked)
        return resident

    def pin(self, name: MemoryName) -> Resident:
        """As `open`; the memory is not evicted until `unpin`."""
        resident = self.open(name)
        with self._lock:
            resident.pins += 1
        return resident

    def unpin(self, resident: Resident) -> None:
        with self._lock:
            resident.pins -= 1
            resident.used_at = time.monotonic()

    def evict(self, unsent: frozenset[MemoryName]) -> None:
        """Evicts idle and surplus memories, and the least recently used until the others fit `max_bytes`.

        Those that requests use or wait for stay, and the one that was used last.

        Args:
            unsent: memories with records that the store does not have yet. They are not evicted for being idle: the
                outbox keeps these records, but until the store answers, the memory cannot be loaded again.
        """
        now = time.monotonic()
        residents = self.all()
        surplus = len(residents) - self._max_resident
        excess = sum(resident.nbytes for resident in residents) - self._max_bytes
        for resident in residents:
            waited_for = bool(resident.unbuilt) and now - resident.used_at < _WAITED_SECONDS
            if resident.pins or waited_for:
                continue
            can_return = resident.loaded and not resident.unbuilt and resident.name not in unsent
            idle = can_return and now - resident.used_at > self._idle_seconds
            too_many = surplus > 0 or (excess > 0 and resident is not residents[-1])
            if (idle or too_many) and self._remove(resident):
                surplus -= 1
                excess -= resident.nbytes

    def _remove(self, resident: Resident) -> bool:
        """False if a request has begun to use it."""
        with self._lock:
            if resident.pins:
                return False
            del self._by_name[resident.name], self._by_tag[resident.tag]
            self.evicted += 1
            return True
