"""Records of a memory, and their packed bytes.

A record is one learned token sequence. Its source and the source's sequence number, which grows with every record,
identify it, so that appending the same record twice has no effect.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from draftwood_service.memory.errors import CorruptValueError, NewerFormatError
from draftwood_strategies.draft import Int32Array

MAX_TOKENS = 8192
"""Tokens of one record; a longer sequence becomes several. Not tuned: it only bounds the size of one stored value."""
OVERHEAD_BYTES = 16
"""Counted for each record towards the quota, beside its tokens."""
_HEAD = struct.Struct("<BBHI")
_FORMAT = 2
_UNTIMED_FORMAT = 1
"""Without the times of the records, as written before there was a maximum age."""
_SOURCE_BYTES = 8


class Kind(enum.IntEnum):
    """Origin of a record's tokens: a request's answer, or a text that an operator warmed the memory with."""

    OUTPUT = 0
    CORPUS = 1


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A token sequence that a memory has learned.

    Attributes:
        source: the writer, 16 hexadecimal digits; a process is a new source each time it starts.
        seq: the source's sequence number, from 1; later records have higher ones.
        tokens: int32[n], 1 <= n <= MAX_TOKENS.
        learned_at: Unix time in seconds, by the writer's clock; 0 if it is not known.
    """

    source: str
    seq: int
    kind: Kind
    tokens: Int32Array
    learned_at: int = 0

    @property
    def weight(self) -> int:
        """Bytes that count towards the quota: independent of compression, so that all replicas evict alike."""
        return 4 * int(self.tokens.size) + OVERHEAD_BYTES


def split(tokens: Int32Array) -> list[Int32Array]:
    """A sequence, int32[n], cut into pieces of at most `MAX_TOKENS`, each for a record of its own."""
    return [tokens[start : start + MAX_TOKENS] for start in range(0, tokens.size, MAX_TOKENS)]


def pack(records: SequenceOf[Record]) -> bytes:
    """The records as columns: sources, numbers, kinds, lengths, times, tokens (two bytes each if that is enough)."""
    sources = sorted({record.source for record in records})
    number = {source: index for index, source in enumerate(sources)}
    tokens = np.concatenate([record.tokens for record in records]) if records else np.empty(0, np.int32)
    wide = bool(tokens.size and int(tokens.max()) > 0xFFFF)
    columns = [
        b"".join(bytes.fromhex(source) for source in sources),
        np.array([number[record.source] for record in records], "<u4").tobytes(),
        np.array([record.seq for record in records], "<u8").tobytes(),
        np.array([record.kind for record in records], "u1").tobytes(),
        np.array([record.tokens.size for record in records], "<u4").tobytes(),
        np.array([record.learned_at for record in records], "<u4").tobytes(),
        tokens.astype("<u4" if wide else "<u2").tobytes(),
    ]
    return b"".join([_HEAD.pack(_FORMAT, wide, len(sources), len(records)), *columns])


def unpack(data: bytes) -> list[Record]:
    """The records of `pack`.

    Raises:
        NewerFormatError: a newer version wrote them: their format or a kind is unknown.
        CorruptValueError: the bytes are not records.
    """
    try:
        form, wide, n_sources, n = _HEAD.unpack_from(data)
        if form > _FORMAT:
            raise NewerFormatError(f"the records have format {form}; this program reads up to {_FORMAT}")
        if form not in (_FORMAT, _UNTIMED_FORMAT):
            raise CorruptValueError(f"the records have format {form}, which does not exist")
        reader = _Reader(data, _HEAD.size)
        raw = reader.take("u1", n_sources * _SOURCE_BYTES).tobytes()
        sources = [raw[at : at + _SOURCE_BYTES].hex() for at in range(0, len(raw), _SOURCE_BYTES)]
        owners, seqs = reader.take("<u4", n).tolist(), reader.take("<u8", n).tolist()
        kinds, lengths = reader.take("u1", n).tolist(), reader.take("<u4", n)
        if kinds and (newest := max(kinds)) > max(Kind):
            raise NewerFormatError(f"a record has kind {newest}; this program knows kinds up to {int(max(Kind))}")
        times = reader.take("<u4", n).tolist() if form == _FORMAT else [0] * n
        tokens = reader.take("<u4" if wide else "<u2", int(lengths.sum())).astype(np.int32)
        pieces = np.split(tokens, np.cumsum(lengths)[:-1]) if n else []
        return [
            Record(sources[owner], seq, Kind(kind), piece, time)
            for owner, seq, kind, piece, time in zip(owners, seqs, kinds, pieces, times, strict=True)
        ]
    except (struct.error, ValueError, IndexError) as error:
        raise CorruptValueError(f"the value is not packed records: {error}") from error


class _Reader:
    """Takes columns from bytes, one after the other."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, dtype: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        column = np.frombuffer(self._data, dtype, count, self._at)
        self._at += column.nbytes
        return column
