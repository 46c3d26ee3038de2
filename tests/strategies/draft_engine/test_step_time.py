from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies.draft_engine.step_times import (
    KNOTS,
    MEASURED_CONTEXT,
    ContextCost,
    MeasuredStepTimes,
    StepSize,
    StepTimeCurve,
    measure,
)


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
        is_slow = {"some runs": len(runs) % 5 == 0, "first runs": first, "changes of the size": changed}[slow]
        return size * 0.001 + (1.0 if is_slow else 0.0)

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
