"""Records of this process that the store does not have yet. Bounded: the oldest are dropped first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from draftwood_memory.local.record_log import Held
from draftwood_memory.store.naming import MemoryName


@dataclass(slots=True, eq=False)
class Waiting:
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
    held: Held

    @property
    def tokens(self) -> int:
        return int(self.held.record.tokens.size)


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
        self._waiting: deque[Waiting] = deque()
        self._taken: list[Waiting] = []
        self._tokens = 0

    @property
    def pending(self) -> int:
        """Number of records that the store has not confirmed."""
        with self._lock:
            return len(self._waiting) + len(self._taken)

    def add(self, waiting: Waiting) -> None:
        with self._lock:
            self._waiting.append(waiting)
            self._tokens += waiting.tokens
            self._bound()

    def take(self, max_tokens: int, without: Container[MemoryName] = ()) -> list[Waiting]:
        """The oldest records but for those of some memories, at least one if there is any. Pending until `settle`."""
        oldest = time.monotonic() - self._max_seconds
        with self._lock:
            assert not self._taken
            left: list[Waiting] = []
            while self._waiting and (not self._taken or max_tokens > 0):
                one = self._waiting.popleft()
                if one.name in without and one.learned >= oldest:
                    left.append(one)
                    continue
                self._tokens -= one.tokens
                if one.learned < oldest:
                    self.dropped += 1
                    continue
                self._taken.append(one)
                max_tokens -= one.tokens
            self._waiting.extendleft(reversed(left))
            return [*self._taken]

    def settle(self, unsent: Iterable[Waiting]) -> None:
        """What was taken is done with, except `unsent`, which wait again."""
        with self._lock:
            self._taken = []
            back = [*unsent]
            self._waiting.extendleft(reversed(back))
            self._tokens += sum(one.tokens for one in back)
            self._bound()

    def discard(self, name: MemoryName, stale: Callable[[Waiting], bool]) -> int:
        """Drops the records of a memory that wait and are stale, but none that are taken; returns how many."""
        with self._lock:
            gone = [one for one in self._waiting if one.name == name and stale(one)]
            if gone:
                dropped = frozenset(map(id, gone))
                self._waiting = deque(one for one in self._waiting if id(one) not in dropped)
                self._tokens -= sum(one.tokens for one in gone)
            return len(gone)

    def of(self, name: MemoryName) -> list[Waiting]:
        """The pending records of a memory, the oldest first."""
        with self._lock:
            return [one for one in (*self._taken, *self._waiting) if one.name == name]

    def names(self) -> frozenset[MemoryName]:
        """The memories with pending records."""
        with self._lock:
            return frozenset(one.name for one in (*self._taken, *self._waiting))

    def _bound(self) -> None:
        while self._tokens > self._max_tokens:
            self._tokens -= self._waiting.popleft().tokens
            self.dropped += 1
