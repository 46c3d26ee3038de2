"""What this process learned and the store has not confirmed, and, for a while, what it has.

Confirmed records are kept for a store that loses its latest writes in a failover: its mark of us goes back, and what
lies after the mark is sent again. Everything is bounded; what is oldest goes first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from service.memory.codec.records import Kind, Record
from service.memory.names import MemoryName
from strategies.draft import Int32Array


@dataclass(slots=True, eq=False)
class Waiting:
    """A record on its way.

    Attributes:
        epoch: the life of the memory that it was learned in; None where the store had not told yet.
        since: when it was learned, on the clock of `time.monotonic`.
    """

    name: MemoryName
    epoch: int | None
    record: Record
    since: float


class Outbox:
    """Safe to call from any thread.

    Args:
        source: this process's name as a source.
        most_tokens: of unconfirmed records.
        retained_tokens: of confirmed ones.
        most_seconds: older records are dropped, confirmed or not.
    """

    def __init__(
        self, source: str, most_tokens: int = 1 << 20, retained_tokens: int = 1 << 20, most_seconds: float = 3600.0
    ) -> None:
        self.source = source
        self.dropped = 0
        self._most_tokens = most_tokens
        self._retained_tokens = retained_tokens
        self._most_seconds = most_seconds
        self._lock = threading.Lock()
        self._seq = 0
        self._pending: dict[MemoryName, deque[Waiting]] = {}
        self._sent: dict[MemoryName, deque[Waiting]] = {}
        self._pending_tokens = 0
        self._sent_tokens = 0
        self._clock: Callable[[], float] = time.monotonic

    @property
    def pending(self) -> int:
        """Records that are not confirmed."""
        with self._lock:
            return sum(map(len, self._pending.values()))

    @property
    def retained(self) -> int:
        """Records that are confirmed and kept."""
        with self._lock:
            return sum(map(len, self._sent.values()))

    def names(self) -> list[MemoryName]:
        """Of the memories with unconfirmed records."""
        with self._lock:
            return [*self._pending]

    def add(self, name: MemoryName, epoch: int | None, kind: Kind, tokens: Int32Array) -> Record:
        """Takes a sequence of at most `records.MAX_TOKENS` tokens."""
        with self._lock:
            self._seq += 1
            record = Record(self.source, self._seq, kind, tokens)
            self._pending.setdefault(name, deque()).append(Waiting(name, epoch, record, self._clock()))
            self._pending_tokens += int(tokens.size)
            while self._pending_tokens > self._most_tokens:
                self._pending_tokens -= self._drop_oldest(self._pending)
                self.dropped += 1
        return record

    def take(self, name: MemoryName, most_tokens: int) -> list[Waiting]:
        """The oldest unconfirmed records of a memory, at least one; they stay here."""
        with self._lock:
            self._expire(name)
            taken: list[Waiting] = []
            for waiting in self._pending.get(name, ()):
                most_tokens -= int(waiting.record.tokens.size)
                if taken and most_tokens < 0:
                    break
                taken.append(waiting)
            return taken

    def confirm(self, name: MemoryName, seq: int) -> None:
        """The store has all of a memory's records up to `seq`."""
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
        """The count of a memory's record that the store confirmed last; 0 where none is kept."""
        with self._lock:
            sent = self._sent.get(name)
            return sent[-1].record.seq if sent else 0

    def forget(self, name: MemoryName) -> None:
        """The store let a memory go for good: what it had confirmed is not sent again."""
        with self._lock:
            for waiting in self._sent.pop(name, ()):
                self._sent_tokens -= int(waiting.record.tokens.size)

    def rewind(self, name: MemoryName, mark: int) -> int:
        """The store has a memory's records up to `mark` only: those after it are unconfirmed again.

        Returns:
            How many.
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
        """The memory's life is `epoch`: records of earlier ones are gone for good, and so is what was learned before
        the latest purge by a process that did not know its life.

        Returns:
            How many records that were.
        """
        now = self._clock()
        gone = 0
        with self._lock:
            for table in (self._pending, self._sent):
                kept: deque[Waiting] = deque()
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
        """The records of a memory with a higher count than `after`, confirmed or not."""
        with self._lock:
            both = (*self._sent.get(name, ()), *self._pending.get(name, ()))
            return [waiting.record for waiting in both if waiting.record.seq > after]

    def _expire(self, name: MemoryName) -> None:
        oldest = self._clock() - self._most_seconds
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
    def _drop_oldest(table: dict[MemoryName, deque[Waiting]]) -> int:
        """Drops the record with the lowest count; returns its tokens."""
        name = min(table, key=lambda one: table[one][0].record.seq)
        oldest = table[name].popleft()
        if not table[name]:
            del table[name]
        return int(oldest.record.tokens.size)
