"""A memory's log as this process has it: the newest records, in the store's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from draftwood_service.memory.codec import Record
from draftwood_service.memory.config import Capacity
from draftwood_service.memory.store.chain import chained

_RECORD_BYTES = 384
"""Of a record's Python objects, beside its tokens: 211 bytes from a snapshot and 389 from the log, with tracemalloc."""


class TenantLog:
    """The records of one memory, oldest first.

    Two processes at the same position with the same chain have the same records, but for those that are too old: other
    evictions depend on nothing but the order, which is the store's.

    Attributes:
        position: of the newest record, counted from 1 since the memory was created or purged; 0 for none.
        chain: the digest of all values up to there.
        tokens: sum over its records.
        marks: the highest sequence number of each source that is or was in it.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._records: deque[Record] = deque()
        self._bytes = 0
        self.position = 0
        self.chain = ""
        self.tokens = 0
        self.marks: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Its memory, in bytes."""
        return self._bytes + _RECORD_BYTES * len(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def resize(self, capacity: Capacity) -> None:
        """Holds at most so much from now on."""
        self._capacity = capacity
        self._evict()

    def drop_older(self, oldest: float) -> bool:
        """Drops the records that were learned before `oldest`, a Unix time; returns whether there were any."""
        kept = [record for record in self._records if record.learned_at >= oldest]
        if len(kept) == len(self._records):
            return False
        self._records = deque(kept)
        self._bytes = sum(record.weight for record in kept)
        self.tokens = sum(int(record.tokens.size) for record in kept)
        return True

    def restore(self, records: Iterable[Record], position: int, chain: str) -> None:
        """Loads the records of a snapshot into an empty log."""
        assert self.position == 0
        for record in records:
            self._add(record)
        self.position, self.chain = position, chain

    def append(self, record: Record | None, value: bytes) -> None:
        """Appends the next value of the store's log; the record is None if the value cannot be decoded."""
        self.position += 1
        self.chain = chained(self.chain, value)
        if record is not None:
            self._add(record)

    def _add(self, record: Record) -> None:
        self._records.append(record)
        self._bytes += record.weight
        self.tokens += int(record.tokens.size)
        self.marks[record.source] = max(record.seq, self.marks.get(record.source, 0))
        self._evict()

    def _evict(self) -> None:
        while len(self._records) > 1 and (self.tokens > self._capacity.tokens or self._bytes > self._capacity.bytes):
            oldest = self._records.popleft()
            self._bytes -= oldest.weight
            self.tokens -= int(oldest.tokens.size)
