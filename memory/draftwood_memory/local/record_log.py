"""A memory's records in this process: the newest ones that its capacity and age allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from draftwood_memory.config import Capacity
from draftwood_memory.records import Record

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
        for one in logged:
            self.append(one)

    @property
    def nbytes(self) -> int:
        """Its memory, in bytes."""
        return self._bytes + _RECORD_BYTES * len(self._records)

    @property
    def first_id(self) -> bytes | None:
        """The id of the oldest entry that holds one of the records; None if the store has none of them."""
        return next((one.id for one in self._records if one.id is not None), None)

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
        self._bytes += logged.record.weight
        self.tokens += int(logged.record.tokens.size)
        self.resize(self.capacity)

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
        self._records.clear()
        self._of_request.clear()
        self.tokens, self._bytes, self.trimmed = 0, 0, True
        for one in kept:
            self.append(one)
        return True

    def _drop(self) -> None:
        gone = self._records.popleft().record
        self._of_request.pop(gone.request, None)
        self._bytes -= gone.weight
        self.tokens -= int(gone.tokens.size)
        self.trimmed = True
