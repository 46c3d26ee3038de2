"""The memories that are in this process: what they hold, the strategies made of it, and which leave.

Strategies belong to the engine's thread once they are published; logs, epochs and positions to the memory's own
thread. The lock guards what requests read and write, and is held for microseconds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import structlog

from service.memory.names import MemoryName, Naming
from service.memory.replica.tenant_log import Capacity, TenantLog
from strategies import Strategy, create
from strategies.draft import Int32Array

_log = structlog.get_logger(__name__)


class Resident:
    """One memory in this process.

    Attributes:
        epoch: which life it is in; None before the store told.
        log: what was learned, as far as the store has told.
        strategies: the instances that requests draft with, by name.
        loaded: the log stands where the store once stood; otherwise it is to be read from the beginning.
        foldable: the log holds all that the store held, so that a snapshot of it loses nothing.
        fold_due: a snapshot should be written.
        wanted: strategies whose instances do not hold the log yet, and who waits for them.
        late: what was learned while instances are being built; None while none are.
        lessons: requests that use it now.
        used_at, checked_at, purged_at, expires_at: on the clock of `time.monotonic`.
        hot_until: until then it is read in every round.
        held_until: until then it is not read, for the store could not serve it.
    """

    def __init__(self, name: MemoryName, tag: str, capacity: Capacity) -> None:
        self.name = name
        self.tag = tag
        self.capacity = capacity
        self.lock = threading.Lock()
        self.epoch: int | None = None
        self.log = TenantLog(capacity)
        self.strategies: dict[str, Strategy] = {}
        self.loaded = False
        self.foldable = True
        self.fold_due = False
        self.wanted: dict[str, Future[None]] = {}
        self.late: list[Int32Array] | None = None
        self.lessons = 0
        self.used_at = time.monotonic()
        self.checked_at = 0.0
        self.hot_until = 0.0
        self.held_until = 0.0
        self.purged_at: float | None = None
        self.expires_at: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its strategies, as far as they tell."""
        return sum(int(getattr(strategy, "nbytes", 0)) for strategy in [*self.strategies.values()])

    def instance(self, name: str) -> tuple[Strategy, Future[None] | None]:
        """The instance of a strategy, and what to wait for until it holds all that was learned; None for nothing.

        Raises:
            UnknownStrategyError: no strategy has this name.
        """
        with self.lock:
            self.used_at = time.monotonic()
            if name not in self.strategies:
                self.strategies[name] = make(name, self.capacity)
                self.wanted[name] = Future()
            return self.strategies[name], self.wanted.get(name)

    def is_current(self, epoch: int | None, since: float) -> bool:
        """Whether what began at `since`, in the life `epoch` as far as that was known, belongs to this life."""
        if epoch is not None:
            return epoch == self.epoch
        return self.purged_at is None or since > self.purged_at

    def renew(self, epoch: int, purged_at: float | None) -> None:
        """Forgets everything and begins the life `epoch`. Live requests keep the strategies that they have."""
        fresh = {name: make(name, self.capacity) for name in [*self.strategies]}
        with self.lock:
            self.epoch, self.purged_at = epoch, purged_at
            self.log = TenantLog(self.capacity)
            self.strategies.update(fresh)
            self.late = None
            self.loaded, self.foldable, self.fold_due = False, True, False


def make(name: str, capacity: Capacity) -> Strategy:
    """A new instance, as large as the memory where it has a size. Raises UnknownStrategyError."""
    try:
        return create(name, capacity_tokens=min(capacity.tokens, capacity.bytes // 4))
    except TypeError:
        return create(name)


def learn(strategy: Strategy, sequences: Iterable[Int32Array]) -> None:
    """Teaches whole sequences to a strategy that can learn them; a failure stays its own."""
    teach: Any = getattr(strategy, "learn", None)
    if teach is None:
        return
    try:
        for tokens in sequences:
            teach(tokens)
    except Exception:
        _log.exception("strategy cannot learn", strategy=type(strategy).__name__)


class Residents:
    """The memories in this process, those used last at the end. Safe to call from any thread.

    Args:
        most: more than so many leave, those used longest ago first.
        idle_seconds: those that nobody used for so long leave.
    """

    def __init__(self, naming: Naming, capacity: Capacity, most: int, idle_seconds: float) -> None:
        self._naming = naming
        self._capacity = capacity
        self._most = most
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._by_name: OrderedDict[MemoryName, Resident] = OrderedDict()
        self._by_tag: dict[str, Resident] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: MemoryName) -> bool:
        return name in self._by_name

    def all(self) -> list[Resident]:
        with self._lock:
            return [*self._by_name.values()]

    def get(self, name: MemoryName) -> Resident | None:
        return self._by_name.get(name)

    def tagged(self, tag: str) -> Resident | None:
        return self._by_tag.get(tag)

    def open(self, name: MemoryName) -> Resident:
        """A memory, which is used now; one that was not here comes, with nothing in it yet."""
        with self._lock:
            resident = self._by_name.get(name)
            if resident is None:
                resident = Resident(name, self._naming.tag(name), self._capacity)
                self._by_name[name] = self._by_tag[resident.tag] = resident
            self._by_name.move_to_end(name)
            return resident

    def begin(self, name: MemoryName) -> Resident:
        """As `open`, for a request: the memory stays here until `end`."""
        resident = self.open(name)
        with self._lock:
            resident.lessons += 1
        return resident

    def end(self, resident: Resident) -> None:
        with self._lock:
            resident.lessons -= 1
            resident.used_at = time.monotonic()

    def evict(self, pinned: frozenset[MemoryName]) -> int:
        """Lets those leave that are idle or too many, but for the pinned and those in use; returns how many left."""
        oldest = time.monotonic() - self._idle_seconds
        with self._lock:
            surplus = len(self._by_name) - self._most
            leaving: list[MemoryName] = []
            for name, resident in self._by_name.items():
                free = resident.lessons == 0 and not resident.wanted and name not in pinned
                if free and resident.loaded and (resident.used_at < oldest or len(leaving) < surplus):
                    leaving.append(name)
            for name in leaving:
                del self._by_tag[self._by_name.pop(name).tag]
        return len(leaving)
