from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies.budgeting.budget import min_worthwhile_score, with_change, with_drafts
from draftwood_strategies.budgeting.step_time import Seconds, StepTimeCurve
from draftwood_strategies.draft import DraftTree, DraftTrees, Float32Array

times = st.dictionaries(st.integers(1, 300), st.floats(1e-4, 1.0), min_size=1, max_size=12)


def of(*scores: float) -> Float32Array:
    return np.array(scores, np.float32)


@given(st.lists(st.floats(0.0, 1.0), max_size=40).map(lambda scores: of(*scores)), st.integers(1, 50), times)
def test_no_other_number_of_nodes_promises_more_than_enough(
    drafted: Float32Array, base: int, seconds: dict[int, float]
) -> None:
    curve = StepTimeCurve(seconds)
    least = min_worthwhile_score(drafted, base, curve.between)
    scores = sorted(drafted.tolist(), reverse=True)
    rates = [(base + sum(scores[:n])) / float(curve(base + n)) for n in range(len(scores) + 1)]
    taken = sum(s >= least for s in scores)
    together = [n for n in range(len(scores) + 1) if n in (0, len(scores)) or scores[n - 1] != scores[n]]
    assert taken in together or math.isinf(least)
    most = max(rates[n] for n in together)
    if math.isinf(least):
        assert most <= 1.05 * rates[0] * (1 + 1e-6)
    else:
        assert rates[taken] == pytest.approx(most, rel=1e-6)
        assert most >= 1.05 * rates[0] * (1 - 1e-6) or not scores


def test_nodes_of_one_score_are_taken_together_or_not_at_all() -> None:
    """The third token begins a block of rows, which costs as much as a full one."""
    assert min_worthwhile_score(of(0.9, 0.8, 0.8), 1, StepTimeCurve({1: 1.0, 3: 1.1, 4: 1.4}).between) == pytest.approx(
        0.8
    )

    def block(fewest: int, most: int) -> Seconds:
        return np.array([1.0, 1.05, 1.1, 2.0])[fewest - 1 : most]

    assert min_worthwhile_score(of(0.9, 0.8, 0.7), 1, block) == pytest.approx(0.8)
    assert min_worthwhile_score(of(0.9, 0.8, 0.8), 1, block) == pytest.approx(0.9)


def test_costly_width_drafts_nothing_and_free_width_everything() -> None:
    scores = of(0.9, 0.5, 0.1)
    assert math.isinf(min_worthwhile_score(scores, 2, StepTimeCurve({1: 1.0, 2: 2.0, 64: 64.0}).between))
    assert min_worthwhile_score(scores, 2, StepTimeCurve({1: 1.0, 64: 1.0}).between) == pytest.approx(0.1)
    assert min_worthwhile_score(of(), 2, StepTimeCurve({1: 1.0}).between) == 0.0


@pytest.mark.parametrize(("seconds", "worth"), [(2.0, False), (1.95, False), (1.85, True)])
def test_a_node_that_hardly_gains_its_time_is_not_worth_it(seconds: float, worth: bool) -> None:
    """Its gain is estimated, and proposing and learning take the host's time."""
    least = min_worthwhile_score(of(1.0), 1, StepTimeCurve({1: 1.0, 2: seconds}).between)
    assert least == (1.0 if worth else math.inf)


@pytest.mark.parametrize(("exponent", "least"), [(0.5, 0.25), (1.0, 0.5), (2.0, math.inf)])
def test_a_node_counts_as_a_power_of_its_score(exponent: float, least: float) -> None:
    """A further token takes 0.4 s; the two nodes count 0.7 and 0.5, 0.5 and 0.25, or 0.25 and 0.06."""
    scores, linear = of(0.5, 0.25), StepTimeCurve({1: 1.0, 3: 1.8}).between
    assert min_worthwhile_score(scores, 1, linear, exponent) == least


def test_a_further_draft_costs_more_than_a_further_node_of_one() -> None:
    """Each node takes as long; the second sequence's only node would do as much as the second node of the first."""
    trees = DraftTrees.of([DraftTree.of([1, 2], scores=[0.9, 0.8]), DraftTree.of([3], scores=[0.7])])
    even = StepTimeCurve({2: 1.0, 5: 1.6}).between
    assert min_worthwhile_score(trees.scores, 2, even) == pytest.approx(0.7)
    assert min_worthwhile_score(trees.scores, 2, with_drafts(even, trees, 0.5)) == pytest.approx(0.8)
    assert with_drafts(even, trees, 0.5)(2, 5).tolist() == pytest.approx([*even(2, 4), even(5, 5)[0] + 0.5])
    assert with_drafts(even, trees, 0.5)(2, 4).tolist() == pytest.approx(even(2, 4).tolist())


@given(st.lists(st.lists(st.sampled_from([0.2, 0.5, 1.0]), max_size=9), min_size=1, max_size=4), st.integers(1, 9))
def test_every_tree_with_a_node_among_the_best_is_a_further_draft(scores: list[list[float]], base: int) -> None:
    """Of nodes with the same score the first ones are the best."""
    trees = DraftTrees.of([DraftTree.of(range(len(one)), [-1] * len(one), one) for one in scores])
    even, n = StepTimeCurve({1: 1.0, 64: 2.0}).between, trees.tokens.size
    rows = np.repeat(np.arange(len(scores)), [len(one) for one in scores])
    order = np.argsort(-trees.scores, kind="stable")
    drafts = [max(len({*rows[order[:count]].tolist()}) - 1, 0) for count in range(n + 1)]
    found = with_drafts(even, trees, 0.5)
    assert found(base, base + n) == pytest.approx(even(base, base + n) + 0.5 * np.array(drafts))


def test_the_size_of_the_last_step_is_kept_where_another_one_gains_little() -> None:
    scores = of(0.9, 0.6, 0.5, 0.1)
    linear = StepTimeCurve({1: 1.0, 5: 1.4}).between
    assert min_worthwhile_score(scores, 1, linear) == pytest.approx(0.5)
    assert min_worthwhile_score(scores, 1, with_change(linear, 3, 0.2)) == pytest.approx(0.6)
    assert min_worthwhile_score(scores, 1, with_change(linear, 1, 0.2)) == pytest.approx(0.5)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 9])
def test_every_size_but_that_of_the_last_step_takes_longer(size: int) -> None:
    linear = StepTimeCurve({1: 1.0, 5: 1.4}).between
    expected = [seconds + 0.2 * (tokens != size) for tokens, seconds in enumerate(linear(2, 5), 2)]
    assert with_change(linear, size, 0.2)(2, 5).tolist() == pytest.approx(expected)
