"""Records of a memory, and the entries of a stream that hold them: packed, compressed and encrypted.

A record is one learned token sequence. An entry holds the records that one process learned one after the other.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from draftwood_memory.errors import CorruptValueError, NewerFormatError
from draftwood_memory.store.encryption import Cipher, KeyRing, Plain
from draftwood_memory.store.naming import MemoryName

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
time to load them (`draftwood bench share`)."""


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

    Every value is bound to the tag of its memory, its purpose and its generation: with keys, a value that was moved
    elsewhere, or brought back after a purge, does not decode.

    Args:
        keys: encrypt the values; None stores them in plain.
    """

    def __init__(self, keys: KeyRing | None = None) -> None:
        self._cipher: Cipher = Plain() if keys is None else keys

    def encode(self, tag: str, generation: int, writer: bytes, records: SequenceOf[Record]) -> bytes:
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
        return self._cipher.encrypt(
            _HEAD.pack(_FORMAT, wide, writer, len(records)) + packed, tag, f"entry {generation}"
        )

    def decode(self, tag: str, generation: int, value: bytes) -> tuple[bytes, list[Record]]:
        """The writer and the records of an entry.

        Raises:
            NewerFormatError, UnknownKeyError: a newer version wrote it, or with a key that is not configured.
            CorruptValueError: it is damaged, or belongs elsewhere.
        """
        data = self._cipher.decrypt(value, tag, f"entry {generation}")
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
            return writer, [Record(Kind(kind), tokens[start:end], at, one) for kind, start, end, at, one in rows]
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
