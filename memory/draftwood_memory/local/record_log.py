"""A memory's records in this process: the newest ones that its capacity and age allow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from draftwood_memory.config import Capacity
from draftwood_memory.records import Record
from draftwood_memory.store.processes import id_order

_RECORD_BYTES = 384
"""Of a record's Python objects, beside its tokens: 211 bytes from a large entry and 389 alone, with tracemalloc."""


@dataclass(slots=True, eq=False)
class LoggedRecord:
    """A record, and the id of the stream's entry that holds it; None while the store does not have it."""

    record: Record
    id: bytes | None = None


class RecordLog:
    """The records of one memory, oldest first.

    Attributes:
        tokens: sum over its records.
        trimmed: records were evicted, so that the stream may begin with a later entry, `first_id`.
    """

    def __init__(self, capacity: Capacity, logged: Iterable[LoggedRecord] = ()) -> None:
        self.capacity = capacity
        self.tokens = 0
        self.trimmed = False
        self._records: deque[LoggedRecord] = deque()
        self._of_request: dict[int, list[Record]] = {}
        self._bytes = 0
        self._unstored = set[LoggedRecord]()
        self._entries = Counter[tuple[int, int]]()
        self._oldest: list[tuple[int, int]] = []
        for one in logged:
            self.append(one)

    @property
    def nbytes(self) -> int:
        """Its memory, in bytes."""
        return self._bytes + _RECORD_BYTES * len(self._records)

    @property
    def first_id(self) -> bytes | None:
        """The id of the oldest entry that holds one of the records; None if the store has none of them. It need not be
        the first record's: what others wrote during an outage of the store comes after what this process learned."""
        while self._oldest and self._oldest[0] not in self._entries:
            heappop(self._oldest)
        return b"%d-%d" % self._oldest[0] if self._oldest else None

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[LoggedRecord]:
        return iter([*self._records])

    def records(self, oldest: float) -> list[Record]:
        """Those that were learned at `oldest` or later, a Unix time."""
        return [one.record for one in [*self._records] if one.record.learned_at >= oldest]

    def of_request(self, request: int) -> list[Record]:
        """The records of an identified request, see `Record.request`, the oldest first."""
        return self._of_request.get(request, [])

    def append(self, logged: LoggedRecord) -> None:
        """Adds a record, and evicts the oldest ones beyond the capacity; the newest stays."""
        self._records.append(logged)
        if logged.record.request:
            self._of_request.setdefault(logged.record.request, []).append(logged.record)
        if logged.id is None:
            self._unstored.add(logged)
        else:
            self._note_entry(logged.id)
        self._bytes += logged.record.weight
        self.tokens += int(logged.record.tokens.size)
        self.resize(self.capacity)

    def stored(self, logged: LoggedRecord, id_: bytes) -> None:
        """The store has a record, which may have left the log, in this entry."""
        logged.id = id_
        if logged in self._unstored:
            self._unstored.remove(logged)
            self._note_entry(id_)

    def resize(self, capacity: Capacity) -> None:
        """Holds at most so much from now on."""
        self.capacity = capacity
        while len(self._records) > 1 and (self.tokens > capacity.tokens or self._bytes > capacity.bytes):
            self._drop()

    def drop_older(self, oldest: float) -> bool:
        """Drops the records that were learned before `oldest`, a Unix time; returns whether there were any."""
        kept = [one for one in self._records if one.record.learned_at >= oldest]
        if len(kept) == len(self._records):
            return False
        while self._records:
            self._drop()
        for one in kept:
            self.append(one)
        return True

    def _note_entry(self, id_: bytes) -> None:
        order = id_order(id_)
        if not self._entries[order]:
            heappush(self._oldest, order)
        self._entries[order] += 1

    def _drop(self) -> None:
        logged = self._records.popleft()
        gone = logged.record
        if logged.id is None:
            self._unstored.discard(logged)
        else:
            order = id_order(logged.id)
            self._entries[order] -= 1
            if not self._entries[order]:
                del self._entries[order]
        if gone.request:
            of_request = self._of_request[gone.request]
            del of_request[0]
            if not of_request:
                del self._of_request[gone.request]
        self._bytes -= gone.weight
        self.tokens -= int(gone.tokens.size)
        self.trimmed = True
