"""Records of a memory: encoded for the store, in the log of this process, and on their way to the store.

A record is one learned token sequence. An entry of a stream holds the records that one process learned one after the
other, packed, compressed and encrypted.
"""

from __future__ import annotations

import enum
import json
import struct
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, TypeAlias, TypeVar

import numpy as np

from draftwood_memory.config import Capacity
from draftwood_memory.errors import CorruptValueError, NewerFormatError
from draftwood_memory.store.encryption import Cipher, KeyRing, Plain
from draftwood_memory.store.naming import MemoryName
from draftwood_memory.store.purges import id_order

Item = TypeVar("Item")
Int32Array: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]

MAX_TOKENS = 8192
"""Tokens of one record; a longer sequence becomes several. It only bounds an export's messages."""
MAX_ENTRY_TOKENS = 1 << 16
"""Tokens of one entry at most. It bounds the size of one stored value, 256 KiB uncompressed."""
WRITER_BYTES = 8
_OVERHEAD_BYTES = 16
_HEAD = struct.Struct("<BB8sI")
_FORMAT = 1
_LEVEL = 1
"""zlib's fastest level: 2,135 KB instead of 2,540 KB for a million tokens drawn at random from 8,000, at no cost in the
time to load them."""
_RECORD_BYTES = 384
"""Of a record's Python objects, beside its tokens: 211 bytes from a large entry and 389 alone, with tracemalloc."""


class Kind(enum.IntEnum):
    """Origin of a record's tokens: a request's answer, or a text that an operator warmed the memory with."""

    OUTPUT = 0
    CORPUS = 1


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A token sequence that a memory has learned.

    Attributes:
        tokens: int32[n], 1 <= n <= MAX_TOKENS.
        learned_at: Unix time in seconds, by the store's clock.
        request: tells answers to one request, sent again, from others, see `request_key`; 0 if it is not known.
    """

    kind: Kind
    tokens: Int32Array
    learned_at: int
    request: int = 0

    @property
    def weight(self) -> int:
        """Bytes that count towards the quota: independent of compression, so that all replicas evict alike."""
        return 4 * int(self.tokens.size) + _OVERHEAD_BYTES


def request_key(request: str, sample: int) -> int:
    """32 bits that identify a sample of a request, never 0. Two requests with the same ones are harmless: what they
    have in common is compared."""
    return zlib.crc32(f"{sample} {request}".encode("utf-8", "surrogatepass")) or 1


def _itself(item: Any) -> Record:
    record: Record = item
    return record


def split(tokens: Int32Array) -> list[Int32Array]:
    """A sequence, int32[n], cut into pieces of at most `MAX_TOKENS`, each for a record of its own."""
    return [tokens[start : start + MAX_TOKENS] for start in range(0, tokens.size, MAX_TOKENS)]


def batched(
    items: SequenceOf[Item], max_tokens: int = MAX_ENTRY_TOKENS, record: Callable[[Item], Record] = _itself
) -> Iterator[list[Item]]:
    """Records, or items with one, in batches of `max_tokens` at most, or of one; by default one entry each."""
    batch: list[Item] = []
    size = 0
    for item in items:
        tokens = record(item).tokens.size
        if batch and size + tokens > max_tokens:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += int(tokens)
    if batch:
        yield batch


class Codec:
    """Encodes and decodes what the streams and hashes of one model's memories hold.

    Every value is bound to the tag of its memory, its purpose and its epoch: with keys, a value that was moved
    elsewhere, or brought back after a purge, does not decode.

    Args:
        keys: encrypt the values; None stores them in plain.
    """

    def __init__(self, keys: KeyRing | None = None) -> None:
        self._cipher: Cipher = Plain() if keys is None else keys

    def encode(self, tag: str, epoch: int, writer: bytes, records: SequenceOf[Record]) -> bytes:
        """An entry.

        Args:
            writer: identifies the process that learned the records, `WRITER_BYTES` bytes.
        """
        tokens = np.concatenate([record.tokens for record in records])
        wide = int(tokens.max(initial=0)) > 0xFFFF
        columns = (
            np.array([record.kind for record in records], "u1"),
            np.array([record.tokens.size for record in records], "<u4"),
            np.array([record.learned_at for record in records], "<u4"),
            tokens.astype("<u4" if wide else "<u2"),
            np.array([record.request for record in records], "<u4"),
        )
        packed = zlib.compress(b"".join(column.tobytes() for column in columns), _LEVEL)
        return self._cipher.encrypt(_HEAD.pack(_FORMAT, wide, writer, len(records)) + packed, tag, f"entry {epoch}")

    def decode(self, tag: str, epoch: int, value: bytes) -> tuple[bytes, list[Record]]:
        """The writer and the records of an entry.

        Raises:
            NewerFormatError, UnknownKeyError: a newer version wrote it, or with a key that is not configured.
            CorruptValueError: it is damaged, or belongs elsewhere.
        """
        data = self._cipher.decrypt(value, tag, f"entry {epoch}")
        if data[:1] > bytes([_FORMAT]):
            raise NewerFormatError(f"the entry has format {data[0]}; this program reads up to {_FORMAT}")
        try:
            _, wide, writer, n = _HEAD.unpack_from(data)
            columns = zlib.decompress(data[_HEAD.size :])
            kinds = np.frombuffer(columns, "u1", n)
            lengths = np.frombuffer(columns, "<u4", n, n)
            times = np.frombuffer(columns, "<u4", n, 5 * n)
            tokens = np.frombuffer(columns, "<u4" if wide else "<u2", int(lengths.sum()), 9 * n).astype(np.int32)
            if n and int(kinds.max()) > max(Kind):
                raise NewerFormatError(f"a record has kind {int(kinds.max())}; this program knows up to {max(Kind):d}")
            requests = np.frombuffer(columns, "<u4", n, 9 * n + tokens.size * (4 if wide else 2))
            ends = np.cumsum(lengths).tolist()
            rows = zip(kinds.tolist(), [0, *ends], ends, times.tolist(), requests.tolist(), strict=False)
            return writer, [
                Record(Kind(kind), tokens[start:end], at, request) for kind, start, end, at, request in rows
            ]
        except (struct.error, zlib.error, ValueError) as error:
            raise CorruptValueError(f"the value is not an entry: {error}") from error

    def encode_name(self, tag: str, name: MemoryName) -> bytes:
        return self._cipher.encrypt(json.dumps([name.tenant, name.arm]).encode(), tag, "name")

    def decode_name(self, tag: str, value: bytes) -> MemoryName:
        """Raises CorruptValueError and its subclasses."""
        try:
            decoded: Any = json.loads(self._cipher.decrypt(value, tag, "name"))
            tenant, arm = decoded
        except (ValueError, TypeError) as error:
            raise CorruptValueError(f"the value is not a memory's name: {error}") from error
        if not (isinstance(tenant, str) and isinstance(arm, str)):
            raise CorruptValueError("the value is not a memory's name: tenant and arm must be text")
        return MemoryName(tenant, arm)


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
        for held in logged:
            self.append(held)

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
        return [held.record for held in [*self._records] if held.record.learned_at >= oldest]

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
        kept = [held for held in self._records if held.record.learned_at >= oldest]
        if len(kept) == len(self._records):
            return False
        while self._records:
            self._drop()
        for held in kept:
            self.append(held)
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


@dataclass(slots=True, eq=False)
class PendingRecord:
    """A record on its way to the store.

    Attributes:
        epoch: of the memory when the request began; None if it was not known yet.
        began: when the request began, on the clock of `time.monotonic`.
        learned: when it ended, on the same clock.
    """

    name: MemoryName
    epoch: int | None
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
