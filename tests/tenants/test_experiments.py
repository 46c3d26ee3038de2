"""Experiments: assignment is uniform, sticky and independent; counters merge over replicas, also as bytes."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_memory.errors import CorruptValueError, NewerFormatError
from draftwood_service.experiments.statistics import log_evidence
from draftwood_tenants.experiments import store as encoding
from draftwood_tenants.experiments.assignment import (
    BUCKETS,
    ExperimentError,
    Split,
    UnitAssignment,
    require_allowed_change,
)
from draftwood_tenants.experiments.counts import (
    BINS,
    EDGES,
    Counts,
    Origin,
    Outcome,
    Recorder,
    Snapshot,
    bin_of,
    column,
    merge,
    quantile,
    total,
)
from tests.service.experiments.test_report import run

SPLIT = Split(b"salt one", ("trie", "hybrid", "off"), (2.0, 1.0, 1.0))
UNITS = 20_000
LIMIT = np.log(1e6)
"""Log-evidence that chance reaches once in a million times."""


@cache
def assigned(split: Split, units: int = UNITS) -> list[UnitAssignment | None]:
    return [split.assign("acme", f"session-{unit}") for unit in range(units)]


def test_arms_get_their_shares_and_buckets_are_even() -> None:
    found = [one for one in assigned(SPLIT) if one is not None]
    assert len(found) == UNITS
    arms = np.bincount([one.arm for one in found], minlength=3).astype(float)
    assert log_evidence(arms, np.array([0.5, 0.25, 0.25])) < LIMIT
    assert log_evidence(arms, np.array([0.45, 0.3, 0.25])) > LIMIT
    buckets = np.bincount([one.bucket for one in found], minlength=BUCKETS).astype(float)
    assert log_evidence(buckets, np.full(BUCKETS, 1 / BUCKETS), 1e5) < LIMIT
    joint = np.bincount([3 * (one.bucket % 4) + one.arm for one in found], minlength=12).astype(float)
    assert log_evidence(joint, np.tile([0.5, 0.25, 0.25], 4) / 4) < LIMIT


def test_the_assignment_of_a_version_stays_that_of_the_next() -> None:
    """A rolling upgrade must move no unit. The values are those of the first version."""
    found = [(one.arm, one.bucket) for one in assigned(SPLIT, 4) if one is not None]
    assert found == [(2, 120), (0, 210), (0, 105), (0, 28)]


def test_experiments_are_independent_of_each_other() -> None:
    one, other = assigned(SPLIT), assigned(replace(SPLIT, salt=b"salt two"))
    table = np.zeros((3, 3))
    for a, b in zip(one, other, strict=True):
        assert a is not None
        assert b is not None
        table[a.arm, b.arm] += 1
    assert log_evidence(table.ravel(), np.outer([0.5, 0.25, 0.25], [0.5, 0.25, 0.25]).ravel()) < LIMIT


def test_the_same_key_of_two_tenants_is_two_units_and_lengths_are_part_of_the_hash() -> None:
    split = Split(b"salt one", ("a", "b"), (1.0, 1.0))
    other = [split.assign("umbrella", f"session-{unit}") for unit in range(2000)]
    same = sum(a == b for a, b in zip(assigned(split, 2000), other, strict=True))
    assert same < 40  # 1 in 512 is expected
    assert split.assign("ab", "c") != split.assign("a", "bc")


def test_coverage_leaves_units_out_and_raising_it_moves_none() -> None:
    half, more = assigned(replace(SPLIT, coverage=0.5)), assigned(replace(SPLIT, coverage=0.8))
    taking_part = sum(one is not None for one in half)
    assert log_evidence(np.array([taking_part, UNITS - taking_part], float), np.array([0.5, 0.5])) < LIMIT
    assert all(a is None or a == b for a, b in zip(half, more, strict=True))
    assert not any(assigned(replace(SPLIT, coverage=0.0), 100))
    arms = np.bincount([one.arm for one in half if one is not None], minlength=3).astype(float)
    assert log_evidence(arms, np.array([0.5, 0.25, 0.25])) < LIMIT


def test_other_tenants_and_explicit_overrides_take_no_part() -> None:
    split = replace(SPLIT, tenants=frozenset({"acme"}))
    assert split.assign("acme", "u") is not None
    assert split.assign("umbrella", "u") is None
    assert split.assign("acme", "u", overridden=True) is None


def test_a_running_experiment_is_frozen_but_for_a_growing_coverage() -> None:
    running = replace(SPLIT, coverage=0.5)
    require_allowed_change(running, replace(running, coverage=0.6))
    for change in ({"weights": (1.0, 1.0, 1.0)}, {"salt": b"salt two"}, {"coverage": 0.4}):
        with pytest.raises(ExperimentError, match=next(iter(change))):
            require_allowed_change(running, replace(running, **change))
    with pytest.raises(ExperimentError, match="salt: 5 bytes"):
        replace(running, salt=b"short")


ORIGIN = Origin("a", "1")
ORIGINS = [ORIGIN, Origin("a", "2"), Origin("b", "1")]


def snapshot_of(origin: Origin, sequence: int) -> Snapshot:
    """The only snapshot of this origin and sequence number: as many requests as its number."""
    counts = Counts.zero(2)
    counts.sums[0, 3, column("requests")] = sequence
    return Snapshot(origin, sequence, counts)


SNAPSHOTS = st.builds(snapshot_of, st.sampled_from(ORIGINS), st.integers(0, 5))


@given(st.lists(SNAPSHOTS, max_size=12), st.randoms(use_true_random=False))
def test_late_repeated_and_reordered_writes_change_nothing(written: list[Snapshot], order: random.Random) -> None:
    repeated = [*written, *written]
    order.shuffle(repeated)
    state = merge(*({one.origin: one} for one in repeated))
    expected = sum(max((one.sequence for one in written if one.origin == origin), default=0) for origin in ORIGINS)
    assert total(state.values(), 2).sums.sum() == expected


def outcome(**values: Any) -> Outcome:
    defaults = {"arrived_at": 100.0, "tokens": 90, "steps": 30, "decode_seconds": 0.3, "ttft_seconds": 0.02}
    return Outcome(**{**defaults, **values})


def test_a_snapshot_does_not_change_when_more_is_counted() -> None:
    recorder = Recorder(ORIGIN, 1)
    recorder.record(UnitAssignment(0, 0), "acme", "u", outcome())
    before = recorder.snapshot()
    recorder.record(UnitAssignment(0, 0), "acme", "v", outcome())
    assert before.counts.sums[0, 0, column("requests")] == 1.0
    assert recorder.snapshot().sequence > before.sequence


def test_units_errors_and_the_burn_in() -> None:
    recorder = Recorder(ORIGIN, 1, measured_from=50.0)
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
    expected = {"requests": 5, "answered": 3, "units": 2, "erred_units": 1, "tokens": 270, "audited": 2, "differing": 1}
    assert {name: counts.sums[0, 7, column(name)] for name in expected} == expected
    assert counts.latencies[0, 0].sum() == 2  # the first answer of each unit
    assert counts.latencies[0, 0, bin_of(9.0)] == 0


def test_of_more_units_than_are_remembered_the_one_seen_longest_ago_counts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftwood_tenants.experiments.counts._MAX_UNITS", 2)
    recorder = Recorder(ORIGIN, 1)
    units = []
    for unit in "abacab":
        recorder.record(UnitAssignment(0, 7), "acme", unit, outcome())
        units.append(recorder.snapshot().counts.sums[0, 7, column("units")])
    assert units == [1, 2, 2, 3, 3, 4]


def test_an_answer_without_a_ttft_is_in_everything_but_the_ttft() -> None:
    recorder = Recorder(ORIGIN, 1)
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


def test_counts_come_back_as_they_were() -> None:
    for counts in (run(300), Counts.zero(8)):
        arms = len(counts.sums)
        data = encoding.encode(Snapshot(ORIGIN, 7, counts))
        found = encoding.decode(ORIGIN, arms, data)
        assert (found.origin, found.sequence) == (ORIGIN, 7)
        assert np.array_equal(found.counts.sums, counts.sums)
        assert np.array_equal(found.counts.latencies, counts.latencies)
        assert len(data) < (counts.sums.nbytes + counts.latencies.nbytes) / 1.9


@pytest.mark.parametrize("version", [1, 2])
def test_counts_of_earlier_formats_are_read(version: int) -> None:
    """Both had three covariates. The first had no count of the answers with a TTFT: all answers had one."""
    counts = run(300)
    covariates, timed = np.ones((*counts.sums.shape[:2], 3)), counts.sums[..., -1:]
    columns = [counts.sums[..., :-1], covariates, *([timed] if version == 2 else [])]
    values = np.concatenate([np.concatenate(columns, axis=-1).ravel(), counts.latencies.ravel()])
    planes = values.astype("<f8").view(np.uint8).reshape(-1, 8).T.tobytes()
    data = struct.pack("<2sBQI", b"dx", version, 7, zlib.crc32(planes)) + zlib.compress(planes)
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
    bomb = struct.pack("<2sBQI", b"dx", 3, 1, 0) + zlib.compress(bytes(10**8))
    with pytest.raises(CorruptValueError):
        encoding.decode(ORIGIN, 2, bomb)
    with pytest.raises(NewerFormatError, match="format 4"):
        encoding.decode(ORIGIN, 2, data[:2] + b"\x04" + data[3:])
