"""When two halves in turn pay."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_model_runner.drafting.overlap import Overlap
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_strategies.budgeting.step_time import StepTimeCurve, StepTimes
from draftwood_strategies.draft import EMPTY_TREE

READING, PER_TOKEN = 4e-3, 30e-6
"""Seconds to read the weights, and to compute a token: from 133 tokens on, a step takes as long as its arithmetic."""


def step_of(rows: int, tokens: int) -> StepBatch:
    chain = np.zeros(tokens, np.int32)
    return lay_out([BatchRow(np.zeros(4, np.int32), 0, chain, EMPTY_TREE, tokens - 1) for _ in range(rows)])


@pytest.fixture
def overlap() -> Overlap:
    sizes = [1, 8, 32, 64, 128, 133, 256, 512, 1024, 4096]
    return Overlap(StepTimes(StepTimeCurve({n: max(READING, PER_TOKEN * n) for n in sizes})))


@pytest.mark.parametrize(
    ("rows", "tokens", "host_seconds", "most"),
    [
        pytest.param(64, 1, 1e-3, None, id="weights would be read twice"),
        pytest.param(64, 1, 10e-3, 32, id="the host takes longer than that"),
        pytest.param(64, 6, 5e-3, 32, id="arithmetic takes longest"),
        pytest.param(32, 6, 2.5e-3, 32, id="halves tell the same as whole steps"),
        pytest.param(64, 6, 0.1e-3, None, id="the host takes next to nothing"),
    ],
)
def test_two_halves_of_64(overlap: Overlap, rows: int, tokens: int, host_seconds: float, most: int | None) -> None:
    overlap.observe(step_of(rows, tokens), host_seconds)
    assert overlap.microbatch(64) == most
    assert overlap.microbatch(63) == most
    assert overlap.microbatch(1) is None


def test_the_latest_steps_count(overlap: Overlap) -> None:
    for seconds, most in ((5e-3, 32), (0.1e-3, None), (5e-3, 32)):
        for _ in range(9):
            overlap.observe(step_of(64, 6), seconds)
        assert overlap.microbatch(64) == most


def test_a_step_that_took_the_host_long_divides_no_others(overlap: Overlap) -> None:
    for _ in range(2):
        overlap.observe(step_of(64, 6), host_seconds=0.1e-3)
    overlap.observe(step_of(64, 6), host_seconds=20.0)  # compiled a function
    assert overlap.microbatch(64) is None


def test_a_step_of_one_sequence_says_little_of_many(overlap: Overlap) -> None:
    """Most of that time the host works on the step itself, not on its sequence."""
    overlap.observe(step_of(1, 1), host_seconds=0.7e-3)
    assert overlap.microbatch(64) is None


H200 = {1: 4.42, 8: 4.53, 32: 4.65, 64: 4.95, 128: 5.85, 256: 7.52, 512: 12.0, 1024: 24.0}
"""Milliseconds of a step by its tokens, measured with a model of 7B; each further sequence took 0.03 longer."""


@pytest.mark.parametrize(
    ("rows", "tokens", "host_seconds", "most"),
    [
        pytest.param(32, 4, 1.0e-3, None, id="32 streams with drafts"),
        pytest.param(64, 3, 1.4e-3, None, id="64 streams with drafts"),
        pytest.param(256, 1, 2.6e-3, None, id="256 streams without"),
        pytest.param(256, 4, 5.8e-3, 128, id="256 streams with drafts"),
    ],
)
def test_on_an_h200(rows: int, tokens: int, host_seconds: float, most: int | None) -> None:
    curve = StepTimeCurve({size: 1e-3 * ms for size, ms in H200.items()})
    overlap = Overlap(StepTimes(curve, per_sequence=3e-5))
    overlap.observe(step_of(rows, tokens), host_seconds)
    assert overlap.microbatch(rows) == most
    overlap.observe(step_of(rows // 2, tokens), 0.6 * host_seconds)  # of a half
    assert overlap.microbatch(rows) == most


def test_nothing_is_divided_without_step_times() -> None:
    overlap = Overlap(None)
    overlap.observe(step_of(64, 6), host_seconds=1.0)
    assert overlap.microbatch(64) is None
