from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.budget import KNOTS, StepTimeCurve, measure, worthwhile_score
from strategies import EMPTY_TREE, DraftTree

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
    assert float(curve(32)) == pytest.approx(3.0, rel=0.01)
    assert float(curve(1)) == 1.0


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


def chain(*scores: float) -> DraftTree:
    return DraftTree.of(range(len(scores)), scores=list(scores))


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), max_size=12).map(lambda s: chain(*sorted(s, reverse=True))), max_size=4),
    st.integers(1, 50),
    times,
)
def test_no_other_number_of_nodes_promises_more_tokens_a_second(
    trees: list[DraftTree], base: int, seconds: dict[int, float]
) -> None:
    curve = StepTimeCurve(seconds)
    least = worthwhile_score(trees, base, curve)
    scores = sorted((s for tree in trees for s in tree.scores.tolist()), reverse=True)
    rates = [(len(trees) + sum(scores[:n])) / float(curve(base + n)) for n in range(len(scores) + 1)]
    taken = sum(s >= least for s in scores)
    # Equal scores are taken together, which costs at most what the last of them brings.
    assert max(rates) == pytest.approx(max(rates[: taken + 1]), rel=1e-6)


def test_costly_width_drafts_nothing_and_free_width_everything() -> None:
    trees = [chain(0.9, 0.5, 0.1), EMPTY_TREE]
    assert math.isinf(worthwhile_score(trees, 2, StepTimeCurve({1: 1.0, 2: 2.0, 64: 64.0})))
    assert worthwhile_score(trees, 2, StepTimeCurve({1: 1.0, 64: 1.0})) == pytest.approx(0.1)
    assert worthwhile_score([], 2, StepTimeCurve({1: 1.0})) == 0.0
