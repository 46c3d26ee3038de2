from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.step_time import KNOTS, StepTimeCurve, StepTimes, measure

times = st.dictionaries(st.integers(1, 300), st.floats(1e-4, 1.0), min_size=1, max_size=12)


@given(times, st.lists(st.tuples(st.integers(1, 400), st.floats(1e-5, 10.0)), max_size=30))
def test_the_curve_stays_lawful_whatever_was_timed(
    seconds: dict[int, float], observed: list[tuple[int, float]]
) -> None:
    curve = StepTimeCurve(seconds)
    for tokens, took in observed:
        curve.observe(tokens, took)
        assert (np.diff(curve.seconds) >= 0).all()
        assert (np.diff(curve.seconds / curve.sizes) <= 1e-12).all()
        assert (np.diff(curve(np.arange(1, 400))) >= -1e-12).all()


def test_follows_a_machine_that_became_slower_at_width() -> None:
    curve = StepTimeCurve({1: 1.0, 8: 1.0, 32: 1.0})
    for _ in range(200):
        curve.observe(32, 3.0)
        curve.observe(1, 1.0)
    assert float(curve(32)) == pytest.approx(3.0, rel=0.05)
    assert float(curve(1)) == pytest.approx(1.0, rel=0.05)


def test_sizes_that_are_not_met_follow_a_machine_that_became_slower() -> None:
    curve = StepTimeCurve({1: 1.0, 8: 1.5, 32: 3.0})
    for _ in range(400):
        curve.observe(8, 3.0)
    assert float(curve(8)) == pytest.approx(3.0, rel=0.05)
    assert float(curve(32)) > 3.5


def test_measures_every_size_and_keeps_the_fastest_run() -> None:
    runs: list[int] = []

    def step(size: int) -> float:
        runs.append(size)
        return size * 0.01 + (5.0 if len(runs) % 3 == 0 else 0.0)

    curve = measure(step, largest=20, limit=60.0)
    assert curve.sizes.tolist() == [n for n in KNOTS if n < 20] + [20]
    assert curve(20) == pytest.approx(0.2)


def test_stops_measuring_at_the_limit() -> None:
    runs: list[int] = []

    def step(size: int) -> float:
        runs.append(size)
        return 0.1

    measure(step, largest=2, limit=0.0)
    assert runs == [2, 1, 2]


def simulate(times: StepTimes, cost: dict[int, dict[int, float]], tokens: int, steps: int) -> list[int]:
    """The threads that steps of one sequence ran on, where a step costs `cost[threads][tokens]`."""
    chosen = []
    for _ in range(steps):
        chosen.append(times.choose_threads(tokens, sequences=1))
        times.observe(tokens, 1, chosen[-1], cost[chosen[-1]][tokens])
    return chosen


def test_narrow_steps_run_on_one_thread_and_wide_ones_on_all() -> None:
    cost = {1: {1: 2.0, 32: 6.0}, 2: {1: 1.95, 32: 4.0}}
    times = StepTimes({threads: StepTimeCurve(curve) for threads, curve in cost.items()})
    narrow, wide = (simulate(times, cost, tokens, 320) for tokens in (1, 32))
    assert narrow.count(1) >= 300
    assert wide.count(2) == 320  # one thread is known to be far too slow: it is not even tried
    assert times.between(1, 32, 1)[[0, 31]].tolist() == pytest.approx([1.95, 4.0])


def test_a_better_number_of_threads_is_found_when_the_load_of_the_machine_changes() -> None:
    times = StepTimes({1: StepTimeCurve({1: 2.0, 32: 5.0}), 2: StepTimeCurve({1: 1.9, 32: 4.0})})
    contended, quiet = {1: {32: 5.0}, 2: {32: 8.0}}, {1: {32: 5.0}, 2: {32: 3.5}}
    assert simulate(times, contended, 32, 100)[-32:].count(1) >= 30
    assert simulate(times, quiet, 32, 3000)[-32:].count(2) >= 30


def test_further_sequences_cost_what_their_steps_show() -> None:
    times = StepTimes({1: StepTimeCurve({1: 2.0, 64: 4.0})})

    def seconds(tokens: int, sequences: int) -> float:
        return float(times.between(tokens, tokens, sequences)[0])

    assert seconds(8, 8) == seconds(8, 1)
    for _ in range(300):
        times.choose_threads(8, 8)
        times.observe(8, 8, 1, seconds(8, 1) + 7 * 0.5)
    assert seconds(8, 8) == pytest.approx(seconds(8, 1) + 3.5, rel=0.01)
    assert seconds(8, 4) == pytest.approx(seconds(8, 1) + 1.5, rel=0.01)
