"""Records of this process that the store has not confirmed, and for a while those that it has.

Confirmed records are kept for a store that loses its latest writes in a failover: its mark of this source goes back,
and the records after the mark are sent again. Everything is bounded; the oldest records are dropped first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from draftwood_service.memory.codec import Kind, Record
from draftwood_service.memory.naming import MemoryName
from draftwood_strategies.draft import Int32Array


@dataclass(slots=True, eq=False)
class OutboxRecord:
    """A record on its way to the store.

    Attributes:
        epoch: of the memory when the record was learned; None if it was not known yet.
        since: when it was learned, on the clock of `time.monotonic`.
    """

    name: MemoryName
    epoch: int | None
    record: Record
    since: float


class Outbox:
    """Safe to call from any thread.

    Args:
        source: identifies this process in its records.
        max_tokens: of unconfirmed records.
        retained_tokens: of confirmed records.
        max_seconds: older records are dropped, confirmed or not.
    """

    def __init__(
        self, source: str, max_tokens: int = 1 << 20, retained_tokens: int = 1 << 20, max_seconds: float = 3600.0
    ) -> None:
        self.source = source
        self.dropped = 0
        self._max_tokens = max_tokens
        self._retained_tokens = retained_tokens
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._seq = 0
        self._pending: dict[MemoryName, deque[OutboxRecord]] = {}
        self._sent: dict[MemoryName, deque[OutboxRecord]] = {}
        self._pending_tokens = 0
        self._sent_tokens = 0
        self._clock: Callable[[], float] = time.monotonic

    @property
    def pending(self) -> int:
        """Number of unconfirmed records."""
        with self._lock:
            return sum(map(len, self._pending.values()))

    @property
    def retained(self) -> int:
        """Number of confirmed records that are kept."""
        with self._lock:
            return sum(map(len, self._sent.values()))

    def pending_memories(self) -> list[MemoryName]:
        """The memories with unconfirmed records."""
        with self._lock:
            return [*self._pending]

    def add(self, name: MemoryName, epoch: int | None, kind: Kind, tokens: Int32Array) -> Record:
        """Adds a piece of `codec.split`, int32[n], as this source's next record."""
        with self._lock:
            self._seq += 1
            record = Record(self.source, self._seq, kind, tokens, int(time.time()))
            self._pending.setdefault(name, deque()).append(OutboxRecord(name, epoch, record, self._clock()))
            self._pending_tokens += int(tokens.size)
            while self._pending_tokens > self._max_tokens:
                self._pending_tokens -= self._drop_oldest(self._pending)
                self.dropped += 1
        return record

    def take(self, name: MemoryName, max_tokens: int) -> list[OutboxRecord]:
        """The oldest unconfirmed records of a memory, at least one if there is any. They stay in the outbox."""
        with self._lock:
            self._expire(name)
            taken: list[OutboxRecord] = []
            for waiting in self._pending.get(name, ()):
                max_tokens -= int(waiting.record.tokens.size)
                if taken and max_tokens < 0:
                    break
                taken.append(waiting)
            return taken

    def confirm(self, name: MemoryName, seq: int) -> None:
        """The store has confirmed a memory's records up to `seq`."""
        with self._lock:
            pending = self._pending.get(name, deque())
            while pending and pending[0].record.seq <= seq:
                waiting = pending.popleft()
                size = int(waiting.record.tokens.size)
                self._sent.setdefault(name, deque()).append(waiting)
                self._pending_tokens -= size
                self._sent_tokens += size
            if not pending:
                self._pending.pop(name, None)
            while self._sent_tokens > self._retained_tokens:
                self._sent_tokens -= self._drop_oldest(self._sent)

    def confirmed(self, name: MemoryName) -> int:
        """The sequence number of a memory's record that was confirmed last; 0 if none is kept."""
        with self._lock:
            sent = self._sent.get(name)
            return sent[-1].record.seq if sent else 0

    def forget(self, name: MemoryName) -> None:
        """The store deleted a memory after its time to live: its confirmed records are not sent again."""
        with self._lock:
            for waiting in self._sent.pop(name, ()):
                self._sent_tokens -= int(waiting.record.tokens.size)

    def discard(self, name: MemoryName) -> int:
        """The store refuses a memory's records for good: drops all; returns how many were unconfirmed."""
        self.forget(name)
        with self._lock:
            gone = self._pending.pop(name, ())
            self._pending_tokens -= sum(int(waiting.record.tokens.size) for waiting in gone)
            return len(gone)

    def rewind(self, name: MemoryName, mark: int) -> int:
        """The store has a memory's records only up to `mark`: those after it become unconfirmed again.

        Returns:
            How many records that were.
        """
        with self._lock:
            sent = self._sent.get(name, deque())
            again = 0
            while sent and sent[-1].record.seq > mark:
                waiting = sent.pop()
                size = int(waiting.record.tokens.size)
                self._pending.setdefault(name, deque()).appendleft(waiting)
                self._sent_tokens -= size
                self._pending_tokens += size
                again += 1
            if not sent:
                self._sent.pop(name, None)
            return again

    def settle(self, name: MemoryName, epoch: int, since_purge: float | None) -> int:
        """The memory's epoch is `epoch`: drops records of earlier epochs, and those that were learned before the latest
        purge while the epoch was not known.

        Args:
            since_purge: seconds since the latest purge; None if there was none.

        Returns:
            How many records were dropped.
        """
        now = self._clock()
        gone = 0
        with self._lock:
            for table in (self._pending, self._sent):
                kept: deque[OutboxRecord] = deque()
                for waiting in table.pop(name, ()):
                    if waiting.epoch is None and (since_purge is None or now - waiting.since < since_purge):
                        waiting.epoch = epoch
                    if waiting.epoch is not None and waiting.epoch >= epoch:
                        kept.append(waiting)
                        continue
                    gone += 1
                    if table is self._pending:
                        self._pending_tokens -= int(waiting.record.tokens.size)
                    else:
                        self._sent_tokens -= int(waiting.record.tokens.size)
                if kept:
                    table[name] = kept
        return gone

    def records(self, name: MemoryName, after: int) -> list[Record]:
        """The records of a memory with a sequence number above `after`, confirmed or not."""
        with self._lock:
            both = (*self._sent.get(name, ()), *self._pending.get(name, ()))
            return [waiting.record for waiting in both if waiting.record.seq > after]

    def _expire(self, name: MemoryName) -> None:
        oldest = self._clock() - self._max_seconds
        pending = self._pending.get(name)
        while pending and pending[0].since < oldest:
            self._pending_tokens -= int(pending.popleft().record.tokens.size)
            self.dropped += 1
        if pending is not None and not pending:
            del self._pending[name]
        sent = self._sent.get(name)
        while sent and sent[0].since < oldest:
            self._sent_tokens -= int(sent.popleft().record.tokens.size)
        if sent is not None and not sent:
            del self._sent[name]

    @staticmethod
    def _drop_oldest(table: dict[MemoryName, deque[OutboxRecord]]) -> int:
        """Drops the record with the lowest sequence number; returns its number of tokens."""
        name = min(table, key=lambda one: table[one][0].record.seq)
        oldest = table[name].popleft()
        if not table[name]:
            del table[name]
        return int(oldest.record.tokens.size)
