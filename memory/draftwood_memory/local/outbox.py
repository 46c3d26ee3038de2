"""Records of this process that the store does not have yet. Bounded: the oldest are dropped first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from draftwood_memory.local.record_log import LoggedRecord
from draftwood_memory.store.naming import MemoryName


@dataclass(slots=True, eq=False)
class PendingRecord:
    """A record on its way to the store.

    Attributes:
        generation: of the memory when the request began; None if it was not known yet.
        began: when the request began, on the clock of `time.monotonic`.
        learned: when it ended, on the same clock.
    """

    name: MemoryName
    generation: int | None
    began: float
    learned: float
    logged: LoggedRecord

    @property
    def tokens(self) -> int:
        return int(self.logged.record.tokens.size)


class Outbox:
    """Safe to call from any thread.

    Args:
        max_tokens: of all records together.
        max_seconds: older records are dropped when they would be sent.

    Attributes:
        dropped: records that were lost: there were too many, or they were too old.
    """

    def __init__(self, max_tokens: int = 1 << 20, max_seconds: float = 3600.0) -> None:
        self.dropped = 0
        self._max_tokens = max_tokens
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._queue: deque[PendingRecord] = deque()
        self._in_flight: list[PendingRecord] = []
        self._tokens = 0

    @property
    def pending(self) -> int:
        """Number of records that the store has not confirmed."""
        with self._lock:
            return len(self._queue) + len(self._in_flight)

    def add(self, record: PendingRecord) -> None:
        with self._lock:
            self._queue.append(record)
            self._tokens += record.tokens
            self._bound()

    def take(self, max_tokens: int, without: Container[MemoryName] = ()) -> list[PendingRecord]:
        """The oldest records but for those of some memories, at least one if there is any. Pending until `requeue`."""
        oldest = time.monotonic() - self._max_seconds
        with self._lock:
            assert not self._in_flight
            left: list[PendingRecord] = []
            while self._queue and (not self._in_flight or max_tokens > 0):
                record = self._queue.popleft()
                if record.name in without and record.learned >= oldest:
                    left.append(record)
                    continue
                self._tokens -= record.tokens
                if record.learned < oldest:
                    self.dropped += 1
                    continue
                self._in_flight.append(record)
                max_tokens -= record.tokens
            self._queue.extendleft(reversed(left))
            return [*self._in_flight]

    def requeue(self, unsent: Iterable[PendingRecord]) -> None:
        """Ends the latest `take`: `unsent` records wait again, the others are sent or refused for good."""
        with self._lock:
            self._in_flight = []
            back = [*unsent]
            self._queue.extendleft(reversed(back))
            self._tokens += sum(record.tokens for record in back)
            self._bound()

    def discard(self, name: MemoryName, stale: Callable[[PendingRecord], bool]) -> int:
        """Drops the stale records of a memory, but none in flight; returns how many."""
        with self._lock:
            gone = [record for record in self._queue if record.name == name and stale(record)]
            if gone:
                dropped = frozenset(map(id, gone))
                self._queue = deque(record for record in self._queue if id(record) not in dropped)
                self._tokens -= sum(record.tokens for record in gone)
            return len(gone)

    def of(self, name: MemoryName) -> list[PendingRecord]:
        """The pending records of a memory, the oldest first."""
        with self._lock:
            return [record for record in (*self._in_flight, *self._queue) if record.name == name]

    def names(self) -> frozenset[MemoryName]:
        """The memories with pending records."""
        with self._lock:
            return frozenset(record.name for record in (*self._in_flight, *self._queue))

    def _bound(self) -> None:
        while self._tokens > self._max_tokens:
            self._tokens -= self._queue.popleft().tokens
            self.dropped += 1
