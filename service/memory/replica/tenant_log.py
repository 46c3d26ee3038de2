"""A memory's log as this process holds it: the newest records, in the order that the store gave them."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from service.memory.codec.records import Record


def chained(chain: str, value: bytes) -> str:
    """The log's digest after one more value; the store's script computes the same."""
    return hashlib.sha1(chain.encode() + value, usedforsecurity=False).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a memory holds; the oldest records leave first, but never the newest one.

    Attributes:
        tokens: at most so many.
        bytes: at most so many by `Record.weight`.
    """

    tokens: int
    bytes: int


class TenantLog:
    """The records of one memory, oldest first.

    Two processes that stand at the same position with the same chain hold the same records: what leaves depends on
    nothing but the order, which is the store's.

    Attributes:
        position: of the newest record, counted from 1 since the memory began; 0 for none.
        chain: the digest of all values up to there.
        tokens: how many its records hold.
        marks: the highest count of each source that is or was in it.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._records: deque[Record] = deque()
        self._bytes = 0
        self.position = 0
        self.chain = ""
        self.tokens = 0
        self.marks: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def restore(self, records: Iterable[Record], position: int, chain: str) -> None:
        """Takes what a snapshot holds; the log is empty before."""
        assert self.position == 0
        for record in records:
            self._add(record)
        self.position, self.chain = position, chain

    def append(self, record: Record | None, value: bytes) -> None:
        """Takes the next value of the store's log; None for a record that cannot be read, whose place it keeps."""
        self.position += 1
        self.chain = chained(self.chain, value)
        if record is not None:
            self._add(record)

    def _add(self, record: Record) -> None:
        self._records.append(record)
        self._bytes += record.weight
        self.tokens += int(record.tokens.size)
        self.marks[record.source] = max(record.seq, self.marks.get(record.source, 0))
        while len(self._records) > 1 and (self.tokens > self._capacity.tokens or self._bytes > self._capacity.bytes):
            oldest = self._records.popleft()
            self._bytes -= oldest.weight
            self.tokens -= int(oldest.tokens.size)
