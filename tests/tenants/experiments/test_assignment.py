"""Assignment: uniform, sticky, independent between experiments."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from draftwood_service.experiments.statistics.mixture import log_evidence
from draftwood_tenants.experiments.assignment import (
    BUCKETS,
    ExperimentError,
    Split,
    UnitAssignment,
    require_allowed_change,
)

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


def test_another_process_assigns_the_same() -> None:
    program = (
        "from draftwood_tenants.experiments.assignment import Split\n"
        f"split = {SPLIT!r}\n"
        "print([(a.arm, a.bucket) for a in (split.assign('acme', f'session-{i}') for i in range(200))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str([(a.arm, a.bucket) for a in assigned(SPLIT, 200) if a is not None])


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"salt": b"short"}, "salt: 5 bytes"),
        ({"arms": ("a", "a", "b")}, "arms: ['a', 'a', 'b']; names that differ are needed"),
    ],
)
def test_wrong_definitions_name_field_and_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        replace(SPLIT, **change)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_running_experiment_is_frozen_but_for_a_growing_coverage() -> None:
    running = replace(SPLIT, coverage=0.5)
    require_allowed_change(running, replace(running, coverage=0.6))
    for change in ({"weights": (1.0, 1.0, 1.0)}, {"salt": b"salt two"}, {"coverage": 0.4}):
        with pytest.raises(ExperimentError, match=next(iter(change))):
            require_allowed_change(running, replace(running, **change))
