"""The step-time model of an engine whose steps are only watched."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_strategies.budgeting.chains import worthwhile_chains
from draftwood_strategies.budgeting.served_times import ServedStepTimes
from draftwood_strategies.draft import DraftTree, DraftTrees


def drafted(times: ServedStepTimes, rows: int, score: float) -> int:
    """Tokens that a step of so many sequences drafts, each offered 16 of the same score."""
    tree = DraftTree.of(np.arange(16), scores=np.full(16, score, np.float32))
    return len(worthwhile_chains(DraftTrees.of([tree] * rows), np.full(rows, 16, np.int32), rows, times.between).tokens)


def serve(times: ServedStepTimes, rows: int, of_token: float, score: float, steps: int) -> int:
    """Steps of so many sequences, where each token costs this share of a step of one; how many had no drafts."""
    plain = 0
    for _ in range(steps):
        tokens = rows + (0 if times.probes(rows) else drafted(times, rows, score))
        plain += tokens == rows
        times.observe(tokens, 0.01 * (1 + of_token * (tokens - 1)))
    return plain


def test_before_the_first_step_likely_tokens_are_drafted() -> None:
    assert drafted(ServedStepTimes(), 1, 0.5) == 16


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_steps_teach_that_tokens_are_dear(rows: int) -> None:
    times = ServedStepTimes()
    serve(times, rows, of_token=0.6, score=0.25, steps=30)
    assert drafted(times, rows, 0.25) == 0
    assert drafted(times, rows, 0.99) > 0


@pytest.mark.parametrize("rows", [1, 8])
def test_where_tokens_are_cheap_hardly_a_step_goes_without_drafts(rows: int) -> None:
    times = ServedStepTimes()
    assert serve(times, rows, of_token=0.001, score=0.3, steps=1000) <= 4
    assert drafted(times, rows, 0.3) == rows * 16


def test_a_load_that_comes_and_goes_is_followed() -> None:
    times = ServedStepTimes()
    for slow in (1.0, 3.0, 1.0):
        for _ in range(300):
            for tokens in (1, 4):
                times.observe(tokens, slow * 0.01 * (1 + 0.3 * (tokens - 1)))
        assert times.at(1) == pytest.approx(slow * 0.01, rel=0.1)
        assert times.at(4) == pytest.approx(slow * 0.019, rel=0.1)


def test_one_slow_step_is_no_measure() -> None:
    times = ServedStepTimes()
    for seconds in (3.0, 0.02, 0.01, 0.012):  # the first one compiled
        times.observe(1, seconds)
    assert times.at(1) == pytest.approx(0.01)
