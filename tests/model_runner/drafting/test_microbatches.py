"""When two halves in turn pay."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_model_runner.draft_policy import MicrobatchPolicy
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_strategies.draft import EMPTY_TREE
from draftwood_strategies.draft_engine.step_times import MeasuredStepTimes, StepTimeCurve

READING, PER_TOKEN = 4e-3, 30e-6
"""Seconds to read the weights, and to compute a token: from 133 tokens on, a step takes as long as its arithmetic."""


def step_of(rows: int, tokens: int) -> StepBatch:
    chain = np.zeros(tokens, np.int32)
    return lay_out([BatchRow(np.zeros(4, np.int32), 0, chain, EMPTY_TREE, tokens - 1) for _ in range(rows)])


@pytest.fixture
def policy() -> MicrobatchPolicy:
    sizes = [1, 8, 32, 64, 128, 133, 256, 512, 1024, 4096]
    return MicrobatchPolicy(MeasuredStepTimes(StepTimeCurve({n: max(READING, PER_TOKEN * n) for n in sizes})))


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
def test_two_halves_of_64(
    policy: MicrobatchPolicy, rows: int, tokens: int, host_seconds: float, most: int | None
) -> None:
    policy.observe(step_of(rows, tokens), host_seconds)
    assert policy.microbatch(64) == most
    assert policy.microbatch(63) == most
    assert policy.microbatch(1) is None


def test_the_mean_follows(policy: MicrobatchPolicy) -> None:
    policy.observe(step_of(64, 6), host_seconds=5e-3)
    for _ in range(100):
        policy.observe(step_of(64, 6), host_seconds=0.1e-3)
    assert policy.microbatch(64) is None


def test_nothing_is_divided_without_step_times() -> None:
    policy = MicrobatchPolicy(None)
    policy.observe(step_of(64, 6), host_seconds=1.0)
    assert policy.microbatch(64) is None
