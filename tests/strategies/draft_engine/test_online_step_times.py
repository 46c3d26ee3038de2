"""The step-time model of an engine whose steps are only watched."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.draft_engine.online_step_times import OnlineStepTimes
from draftwood_strategies.draft_engine.step_times import StepSize
from draftwood_strategies.draft_engine.worth import worthwhile_chains


def at(times: OnlineStepTimes, tokens: int, sequences: int) -> float:
    """Seconds of a step."""
    return float(times.between(tokens, tokens, sequences)[0])


def drafted(times: OnlineStepTimes, rows: int, score: float) -> int:
    """Tokens that a step of so many sequences drafts, each offered 16 of the same score."""
    tree = DraftTree.of(np.arange(16), scores=np.full(16, score, np.float32))
    seconds = partial(times.between, sequences=rows)
    return len(worthwhile_chains(DraftTrees.of([tree] * rows), np.full(rows, 16, np.int32), rows, seconds).tokens)


def serve(times: OnlineStepTimes, rows: int, of_token: float, score: float, steps: int) -> int:
    """Steps of so many sequences, where each token costs this share of a step of one; how many had no drafts."""
    plain = 0
    for _ in range(steps):
        tokens = rows + (0 if times.probes(rows) else drafted(times, rows, score))
        plain += tokens == rows
        times.observe(StepSize(tokens, rows), 0.01 * (1 + of_token * (tokens - 1)))
    return plain


@pytest.mark.parametrize("rows", [1, 32])
def test_likely_tokens_are_drafted_until_steps_teach_that_tokens_are_dear(rows: int) -> None:
    times = OnlineStepTimes()
    assert drafted(times, rows, 0.5) == rows * 16
    serve(times, rows, of_token=0.6, score=0.25, steps=30)
    assert drafted(times, rows, 0.25) == 0
    assert drafted(times, rows, 0.99) > 0


@pytest.mark.parametrize("rows", [1, 8])
def test_where_tokens_are_cheap_hardly_a_step_goes_without_drafts(rows: int) -> None:
    times = OnlineStepTimes()
    assert serve(times, rows, of_token=0.001, score=0.3, steps=1000) <= 12
    assert drafted(times, rows, 0.3) == rows * 16


def test_a_load_that_comes_and_goes_is_followed() -> None:
    times = OnlineStepTimes()
    for slow in (1.0, 3.0, 1.0):
        for _ in range(300):
            for tokens in (1, 4):
                times.observe(StepSize(tokens, 1), slow * 0.01 * (1 + 0.3 * (tokens - 1)))
        assert at(times, 1, 1) == pytest.approx(slow * 0.01, rel=0.1)
        assert at(times, 4, 1) == pytest.approx(slow * 0.019, rel=0.1)


def test_one_slow_step_is_no_measure() -> None:
    times = OnlineStepTimes()
    for seconds in (3.0, 0.02, 0.01, 0.012):  # the first one compiled
        times.observe(StepSize(1, 1), seconds)
    assert at(times, 1, 1) == pytest.approx(0.01)


def test_many_rows_teach_nothing_wrong_about_drafts_of_few() -> None:
    """A token is cheaper as a draft than as a row of its own."""
    times, random = OnlineStepTimes(), np.random.default_rng(1)

    def seconds(rows: int, tokens: int) -> float:
        return 0.007 + 0.00015 * rows + 0.0003 * tokens

    for rows in (32, 8):
        for _ in range(200):
            tokens = rows * int(random.integers(1, 4))
            times.observe(StepSize(tokens, rows), seconds(rows, tokens))
    for tokens in (8, 16, 24):
        assert at(times, tokens, 8) == pytest.approx(seconds(8, tokens), rel=0.03)
    assert at(times, 64, 32) == pytest.approx(seconds(32, 64), rel=0.03)


def test_noise_leaves_the_price_of_a_draft_as_it_is() -> None:
    """Steps that differ by 5%, and one in thirty that another process holds up."""
    times, random = OnlineStepTimes(), np.random.default_rng(2)
    found = []
    for number in range(3000):
        tokens = int(random.integers(1, 17))
        noise = np.exp(random.normal(0, 0.05)) * (1.5 if random.random() < 0.03 else 1.0)
        times.observe(StepSize(tokens, 1), (0.007 + 0.0004 * tokens) * noise)
        if number > 1000:
            found.append(at(times, 16, 1) / at(times, 8, 1) - 1)
    right = 0.0134 / 0.0102 - 1
    assert np.mean(found) == pytest.approx(right, rel=0.1)
    assert np.std(found) < 0.1 * right


def test_rows_that_were_not_seen_begin_with_what_others_cost() -> None:
    times = OnlineStepTimes()
    serve(times, 8, of_token=0.6, score=0.25, steps=100)
    assert not times.known(2)
    assert at(times, 16, 2) / at(times, 8, 2) == pytest.approx(at(times, 16, 8) / at(times, 8, 8))


@pytest.mark.parametrize(("seconds_later", "drafts"), [(0.006, True), (0.045, False)])
def test_slow_first_steps_of_a_size_end_no_drafts_and_later_ones_until_they_are_tried_again(
    seconds_later: float, drafts: bool
) -> None:
    """A step after 256, 512 and so on finds out whether what made them dear is over."""
    times = OnlineStepTimes()
    for _ in range(20):
        times.observe(StepSize(1, 1), 0.004)
    for _ in range(4):
        assert drafted(times, 1, 0.3) > 0
        times.observe(StepSize(12, 1), 0.045)
    assert drafted(times, 1, 0.3) == 0, "it was no accident"
    with_drafts = 0
    for _ in range(8200):
        tokens = 1 + drafted(times, 1, 0.3)
        with_drafts += tokens > 1
        times.observe(StepSize(tokens, 1), seconds_later if tokens > 1 else 0.004)
    assert with_drafts > 7000 if drafts else 1 <= with_drafts <= 8
