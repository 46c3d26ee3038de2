"""Counters that merge over replicas; as bytes all of them comes back, and nothing damaged, too large or newer does."""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_memory.errors import CorruptValueError, NewerFormatError
from draftwood_tenants.experiments.assignment import UnitAssignment
from draftwood_tenants.experiments.counters import Counts, Origin, Recorder, Snapshot, merge, total
from draftwood_tenants.experiments.latencies import BINS, EDGES, bin_of, quantile
from draftwood_tenants.experiments.outcomes import FIELDS, Outcome, column
from draftwood_tenants.experiments.store import encoding
from tests.service.experiments.test_report import run

ORIGINS = [Origin("a", "1"), Origin("a", "2"), Origin("b", "1")]


def snapshot_of(origin: Origin, sequence: int) -> Snapshot:
    """The only snapshot of this origin and sequence number: as many requests as its number."""
    counts = Counts.zero(2)
    counts.sums[0, 3, column("requests")] = sequence
    return Snapshot(origin, sequence, counts)


SNAPSHOTS = st.builds(snapshot_of, st.sampled_from(ORIGINS), st.integers(0, 5))
STATES = st.dictionaries(st.sampled_from(ORIGINS), st.integers(0, 5)).map(
    lambda known: {origin: snapshot_of(origin, sequence) for origin, sequence in known.items()}
)


def sequences(state: dict[Origin, Snapshot]) -> dict[Origin, int]:
    return {origin: snapshot.sequence for origin, snapshot in state.items()}


@given(STATES, STATES, STATES)
def test_merging_is_idempotent_commutative_and_associative(
    a: dict[Origin, Snapshot], b: dict[Origin, Snapshot], c: dict[Origin, Snapshot]
) -> None:
    assert sequences(merge(a, a)) == sequences(a)
    assert sequences(merge(a, b)) == sequences(merge(b, a))
    assert sequences(merge(merge(a, b), c)) == sequences(merge(a, merge(b, c)))


@given(st.lists(SNAPSHOTS, max_size=12), st.randoms(use_true_random=False))
def test_late_repeated_and_reordered_writes_change_nothing(written: list[Snapshot], order: random.Random) -> None:
    repeated = [*written, *written]
    order.shuffle(repeated)
    state = merge(*({one.origin: one} for one in repeated))
    expected = sum(max((one.sequence for one in written if one.origin == origin), default=0) for origin in ORIGINS)
    assert total(state.values(), 2).sums.sum() == expected


def outcome(**values: object) -> Outcome:
    defaults = {
        "arrived_at": 100.0, "prompt_tokens": 9, "tokens": 90, "steps": 30,
        "decode_seconds": 0.3, "ttft_seconds": 0.02,
    }  # fmt: skip
    return Outcome(**{**defaults, **values})  # type: ignore[arg-type]


def test_a_snapshot_does_not_change_when_more_is_counted() -> None:
    recorder = Recorder(Origin("a", "1"), 1)
    recorder.record(UnitAssignment(0, 0), "acme", "u", outcome())
    before = recorder.snapshot()
    recorder.record(UnitAssignment(0, 0), "acme", "v", outcome())
    assert before.counts.sums[0, 0, column("requests")] == 1.0
    assert recorder.snapshot().sequence > before.sequence


def test_units_errors_and_the_burn_in() -> None:
    recorder = Recorder(Origin("a", "1"), 1, measured_from=50.0)
    assignment = UnitAssignment(0, 7)
    recorder.record(assignment, "acme", "u", outcome(arrived_at=49.0))
    recorder.record(assignment, "acme", "u", outcome(erred=True, tokens=5))
    recorder.record(assignment, "acme", "u", outcome(erred=True))
    recorder.record(assignment, "acme", "u", outcome())
    recorder.record_audit(assignment, differing=True)
    recorder.record_audit(assignment, differing=False)
    recorder.record(assignment, "acme", "u", outcome(ttft_seconds=9.0))
    recorder.record(assignment, "umbrella", "u", outcome())
    counts = recorder.snapshot().counts
    found = {
        name: counts.sums[0, 7, column(name)] for name in ("requests", "answered", "units", "erred_units", "tokens")
    }
    assert found == {"requests": 5, "answered": 3, "units": 2, "erred_units": 1, "tokens": 270}
    assert [counts.sums[0, 7, column(name)] for name in ("audited", "differing")] == [2, 1]
    assert counts.latencies[0, 0].sum() == 2  # the first answer of each unit
    assert counts.latencies[0, 0, bin_of(9.0)] == 0


def test_of_more_units_than_are_remembered_the_one_seen_longest_ago_counts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftwood_tenants.experiments.counters._MAX_UNITS", 2)
    recorder = Recorder(Origin("a", "1"), 1)
    units = []
    for unit in "abacab":
        recorder.record(UnitAssignment(0, 7), "acme", unit, outcome())
        units.append(recorder.snapshot().counts.sums[0, 7, column("units")])
    assert units == [1, 2, 2, 3, 3, 4]


def test_an_answer_without_a_ttft_is_in_everything_but_the_ttft() -> None:
    recorder = Recorder(Origin("a", "1"), 1)
    for unit, seconds in enumerate((0.5, None, None)):
        recorder.record(UnitAssignment(0, 7), "acme", str(unit), outcome(ttft_seconds=seconds))
    counts = recorder.snapshot().counts
    found = [counts.sums[0, 7, column(name)] for name in ("answered", "timed", "ttft_seconds", "tokens")]
    assert found == [3, 1, 0.5, 270]
    assert counts.latencies[0].sum(-1).tolist() == [1, 3]


def test_counts_of_another_number_of_arms_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        total([Snapshot(ORIGINS[0], 1, Counts.zero(3))], 2)


def test_bins_have_their_edges_at_the_right() -> None:
    assert bin_of(0.0) == 0
    assert bin_of(float(EDGES[5])) == 5
    assert bin_of(float(EDGES[5]) * 1.0001) == 6
    assert bin_of(1e9) == BINS - 1
    assert EDGES[-1] > 1000.0
    histogram = np.zeros(BINS)
    assert np.isnan(quantile(histogram, 0.5))
    histogram[[10, 20, 30]] = 1
    assert quantile(histogram, 0.5) == EDGES[20]


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
