"""Snapshots as bytes: a header, and the counts compressed. Half of the numbers are small and whole, many are 0."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from draftwood_memory.errors import CorruptValueError, NewerFormatError
from draftwood_tenants.experiments.counters import Counts, Origin, Snapshot
from draftwood_tenants.experiments.outcomes import column

VERSION = 2
"""1 had no count of the answers with a TTFT: all of its answers have one."""
_HEADER = struct.Struct("<2sBQI")
_MAGIC = b"dx"
_TIMED = column("timed")
_LEVEL = 1
"""Of zlib. Two arms take 72 KB in RAM and 33 KB encoded, in 1 ms; level 6 makes 30 KB of it, in 5 ms."""


def encode(snapshot: Snapshot) -> bytes:
    """The snapshot without its origin."""
    counts = snapshot.counts
    values = np.concatenate([counts.sums.ravel(), counts.latencies.ravel()]).astype("<f8", copy=False)
    planes = values.view(np.uint8).reshape(-1, 8).T.tobytes()  # equal bytes of neighbours side by side
    body = zlib.compress(planes, _LEVEL)
    return _HEADER.pack(_MAGIC, VERSION, snapshot.sequence, zlib.crc32(planes)) + body


def decode(origin: Origin, arms: int, data: bytes) -> Snapshot:
    """The snapshot of a process.

    Raises:
        NewerFormatError: a newer version of this program wrote it.
        CorruptValueError: it cannot be read, or is of another number of arms.
    """
    if len(data) < _HEADER.size:
        raise CorruptValueError(f"counts: {len(data)} bytes are too few")
    magic, version, sequence, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptValueError("counts: the value is something else")
    if version > VERSION:
        raise NewerFormatError(f"counts: format {version}; this version reads up to {VERSION}")
    counts = Counts.zero(arms)
    sums = counts.sums if version == VERSION else counts.sums[..., :_TIMED]
    size = sums.nbytes + counts.latencies.nbytes
    reader = zlib.decompressobj()
    try:
        planes = reader.decompress(data[_HEADER.size :], size)
    except zlib.error as error:
        raise CorruptValueError(f"counts: {error}") from None
    if len(planes) != size or not reader.eof or zlib.crc32(planes) != checksum:
        raise CorruptValueError(f"counts: not those of {arms} arms, or damaged")
    values = np.frombuffer(planes, np.uint8).reshape(8, -1).T.copy().view("<f8").ravel()
    sums[...] = values[: sums.size].reshape(sums.shape)
    if version < VERSION:
        counts.sums[..., _TIMED] = sums[..., column("answered")]
    counts.latencies[...] = values[sums.size :].reshape(counts.latencies.shape)
    return Snapshot(origin, sequence, counts)
