"""Step-time models: of an engine that is measured before it serves, and of one whose steps are only watched."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.draft_engine.online_step_times import OnlineStepTimes
from draftwood_strategies.draft_engine.step_times import (
    KNOTS,
    MEASURED_CONTEXT,
    ContextCost,
    MeasuredStepTimes,
    StepSize,
    StepTimeCurve,
    measure,
)
from draftwood_strategies.draft_engine.worth import worthwhile_chains


@given(
    st.dictionaries(st.integers(1, 300), st.floats(1e-4, 1.0), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 400), st.floats(-0.5, 1.0)), max_size=30),
)
def test_the_curve_is_lawful_whatever_was_timed(seconds: dict[int, float], surprises: list[tuple[int, float]]) -> None:
    curve = StepTimeCurve(seconds)
    for tokens, error in surprises:
        curve.correct(tokens, error)
        assert (np.diff(curve.seconds) >= 0).all()
        assert (np.diff(curve.seconds / curve.sizes) <= 1e-12).all()
        assert (np.diff(curve(np.arange(1, 400))) >= -1e-12).all()


def step_times(seconds: dict[int, float], per_sequence: float = 0.0) -> MeasuredStepTimes:
    return MeasuredStepTimes(StepTimeCurve(seconds), per_sequence)


def seconds_of(times: MeasuredStepTimes, tokens: int, sequences: int = 1) -> float:
    return float(times.between(tokens, tokens, sequences)[0])


@pytest.mark.parametrize(
    ("measured", "taken", "rounds", "rel"),
    [
        pytest.param({1: 1.0, 8: 1.0, 32: 1.0}, {32: 3.0, 1: 1.0}, 200, 0.05, id="at width"),
        # As with 32 streams and a few draft nodes: a step of 36 tokens must not count as one of 32.
        pytest.param({1: 0.5, 32: 1.0, 48: 1.05}, {32: 1.0, 36: 1.1}, 1000, 0.02, id="between two sizes"),
    ],
)
def test_follows_a_machine_that_became_slower(
    measured: dict[int, float], taken: dict[int, float], rounds: int, rel: float
) -> None:
    times = step_times(measured)
    for _ in range(rounds):
        for tokens, seconds in taken.items():
            times.observe(StepSize(tokens, 1), seconds)
    assert {tokens: seconds_of(times, tokens) for tokens in taken} == pytest.approx(taken, rel=rel)


def test_sizes_that_are_not_met_follow_a_machine_that_became_slower() -> None:
    times = step_times({1: 1.0, 8: 1.5, 32: 3.0})
    for _ in range(400):
        times.observe(StepSize(8, 1), 3.0)
    assert seconds_of(times, 8) == pytest.approx(3.0, rel=0.05)
    assert seconds_of(times, 32) > 3.5


def test_beyond_what_was_measured_a_step_costs_more_even_if_the_last_sizes_cost_the_same() -> None:
    curve = StepTimeCurve({1: 1.0, 32: 2.0, 64: 3.0, 128: 3.0})
    assert curve(256) == pytest.approx(3.0 + 128 * 2 / 127)
    assert StepTimeCurve({1: 1.0, 64: 1.0, 128: 2.0})(256) == pytest.approx(4.0)  # as steep as from 64
    assert step_times({1: 1.0, 32: 2.0, 64: 3.0, 128: 3.0}).between(4000, 4000, 1)[0] > 40.0


@pytest.mark.parametrize("slow", ["some runs", "first runs", "changes of the size"])
def test_measures_every_size_and_keeps_the_fastest_run(slow: str) -> None:
    """With 4-bit weights the first step of one token took a second, beside 0.02 s for the next ones."""
    runs: list[int] = []

    def step(size: int) -> float:
        first, changed = size not in runs, size not in runs[-1:]
        runs.append(size)
        if slow == "changes of the size":
            return size * 0.001 + 0.05 * changed
        return size * 0.001 + 1.0 * (first if slow == "first runs" else len(runs) % 5 == 0)

    curve = measure(step, largest=20, limit=0.0 if slow == "first runs" else 60.0)
    assert curve.sizes.tolist() == [n for n in KNOTS if n < 20] + [20]
    assert [curve(size) for size in (1, 8, 20)] == pytest.approx([0.001, 0.008, 0.02])


def test_stops_measuring_at_the_limit() -> None:
    runs: list[int] = []

    def step(size: int) -> float:
        runs.append(size)
        return 0.05 if size == 1 else 0.2

    measure(step, largest=2, limit=0.0)
    assert runs == [2, 1, 1, 2]  # a short step is run twice


def test_drafts_and_changes_are_taken_off_before_the_curve_is_corrected() -> None:
    times = MeasuredStepTimes(StepTimeCurve({1: 1.0, 64: 2.0}), per_draft=0.1, per_change=0.5)
    expected = times.at(64, sequences=4)
    times.observe(StepSize(64, 4, drafts=4, changed=True), expected + 3 * 0.1 + 0.5)
    assert times.at(64, sequences=4) == pytest.approx(expected)
    times.observe(StepSize(64, 4, drafts=4), expected + 0.5)
    assert times.at(64, sequences=4) > expected


def test_a_second_block_of_rows_costs_as_much_as_if_it_were_full() -> None:
    times = MeasuredStepTimes(StepTimeCurve({1: 1.0, 64: 64.0}), per_padding=0.5)
    expected = [63.0, 64.0, 65.0 + 63 * 0.5, 66.0 + 62 * 0.5]
    assert times.between(63, 66, 1) == pytest.approx(expected)
    assert [times.at(n, 1) for n in (63, 64, 65, 66)] == pytest.approx(expected)
    assert times.between(127, 129, 3) == pytest.approx([127.5, 128.0, 129.0 + 63 * 0.5])
    for _ in range(300):
        times.observe(StepSize(80, 1), 80.0 + 48 * 0.5)  # as expected: nothing is corrected
    assert times.at(80, 1) == pytest.approx(104.0)
    assert times.at(32, 1) == pytest.approx(32.0)


@pytest.mark.parametrize("first", [0.0, 0.1, 2.0])
def test_further_sequences_cost_what_their_steps_show(first: float) -> None:
    times = step_times({1: 2.0, 64: 4.0}, first)
    assert seconds_of(times, 8, 8) == pytest.approx(seconds_of(times, 8) + 7 * first)

    def took(tokens: int, sequences: int) -> float:
        return 2.0 + 2.0 * (tokens - 1) / 63 + 0.5 * (sequences - 1)

    for _ in range(300):
        for size in ((8, 1), (8, 8), (40, 8), (4, 4)):
            times.observe(StepSize(*size), took(*size))
    for size in ((8, 1), (8, 8), (40, 8), (20, 6)):
        assert seconds_of(times, *size) == pytest.approx(took(*size), rel=0.07)


def test_wide_steps_of_many_sequences_are_learned_from_such_steps_alone() -> None:
    """Another process came: everything takes twice as long, and width three times as long."""
    times = step_times({1: 3.0, 32: 5.0, 64: 6.0, 128: 9.0}, 0.2)
    narrow, wide = 6.0 + 0.15 * 32 + 0.4 * 31, 6.0 + 0.15 * 300 + 0.4 * 31
    for _ in range(300):
        times.observe(StepSize(32, 32), narrow)
        times.observe(StepSize(300, 32), wide)
    assert seconds_of(times, 300, 32) - seconds_of(times, 32, 32) == pytest.approx(wide - narrow, rel=0.05)


def test_longer_contexts_cost_what_their_steps_show() -> None:
    """Measured at first as if attention were three times as fast as it is."""
    true, guess = ContextCost(2e-4, 1e-4), ContextCost(0.7e-4, 0.3e-4)
    times = MeasuredStepTimes(StepTimeCurve({1: 1.0, 64: 2.0}), 0.0, guess)

    def took(tokens: int, context: int) -> float:
        beyond = max(context - MEASURED_CONTEXT, 0)
        return 1.0 + (tokens - 1) / 63 + beyond * (true.per_sequence + tokens * true.per_token)

    for _ in range(600):
        for tokens, context in ((1, 100), (16, 100), (1, 4000), (16, 4000)):
            times.observe(StepSize(tokens, 1, context), took(tokens, context))
    for tokens, context in ((1, 64), (16, 128), (8, 4000), (16, 2000)):
        found = float(times.between(tokens, tokens, 1, context)[0])
        assert found == pytest.approx(took(tokens, context), rel=0.25)
        assert found == pytest.approx(times.at(tokens, 1, context))
    assert times.between(1, 16, 1, 4000)[15] > times.between(1, 16, 1, 128)[15]


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
