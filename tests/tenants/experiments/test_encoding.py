"""Counts as bytes: all of it comes back, and nothing that is damaged, too large or newer does."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from draftwood_memory.errors import CorruptValueError, NewerFormatError
from draftwood_tenants.experiments.counters import Counts, Origin, Snapshot
from draftwood_tenants.experiments.outcomes import FIELDS, column
from draftwood_tenants.experiments.store import encoding
from tests.service.experiments.statistics.test_report import run

ORIGIN = Origin("a", "1")


def test_counts_come_back_as_they_were() -> None:
    for counts in (run(300), Counts.zero(8)):
        arms = len(counts.sums)
        data = encoding.encode(Snapshot(ORIGIN, 7, counts))
        found = encoding.decode(ORIGIN, arms, data)
        assert (found.origin, found.sequence) == (ORIGIN, 7)
        assert np.array_equal(found.counts.sums, counts.sums)
        assert np.array_equal(found.counts.latencies, counts.latencies)
        assert len(data) < (counts.sums.nbytes + counts.latencies.nbytes) / 1.9


def test_counts_of_the_first_format_are_read() -> None:
    """It had no count of the answers with a TTFT: all answers had one."""
    counts = run(300)
    values = np.concatenate([counts.sums[..., : len(FIELDS) - 1].ravel(), counts.latencies.ravel()])
    planes = values.astype("<f8").view(np.uint8).reshape(-1, 8).T.tobytes()
    data = struct.pack("<2sBQI", b"dx", 1, 7, zlib.crc32(planes)) + zlib.compress(planes)
    found = encoding.decode(ORIGIN, 2, data).counts
    assert np.array_equal(found.sums, counts.sums)
    assert np.array_equal(found.latencies, counts.latencies)
    assert found.sums[..., column("timed")].sum() > 250


def test_what_cannot_be_read_is_refused() -> None:
    data = encoding.encode(Snapshot(ORIGIN, 7, run(50)))
    for at in range(0, len(data), 97):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        if 3 <= at < 11:  # the sequence number, which the store has as well
            continue
        with pytest.raises(CorruptValueError):
            encoding.decode(ORIGIN, 2, bytes(damaged))
    for broken in (b"", data[:10], data[:-1], b"x" * 1000):
        with pytest.raises(CorruptValueError):
            encoding.decode(ORIGIN, 2, broken)
    with pytest.raises(CorruptValueError, match="3 arms"):
        encoding.decode(ORIGIN, 3, data)
    bomb = struct.pack("<2sBQI", b"dx", 2, 1, 0) + zlib.compress(bytes(10**8))
    with pytest.raises(CorruptValueError):
        encoding.decode(ORIGIN, 2, bomb)
    with pytest.raises(NewerFormatError, match="format 3"):
        encoding.decode(ORIGIN, 2, data[:2] + b"\x03" + data[3:])
