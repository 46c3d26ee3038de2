"""Chains: the path of each tree that is worth most in its batch."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies.arrays import Float64Array
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.draft_engine.step_times import StepTimeCurve
from draftwood_strategies.draft_engine.worth import (
    best_chains,
    branches,
    branches_by_row,
    branches_in,
    min_worthwhile_score,
    with_branches,
    with_change,
    with_drafts,
    worthwhile_chains,
)
from tests.strategies.test_draft import paths, trees

TREES = st.lists(
    trees(12).map(lambda tree: DraftTree.of(range(len(tree)), tree.parents, tree.scores)), min_size=1, max_size=4
)
"""A node's token is its number."""


def seconds(fewest: int, most: int) -> Float64Array:
    """Of steps of so many tokens."""
    return np.asarray(1.0 + 0.05 * np.arange(fewest, most + 1), np.float64)


@given(
    st.lists(st.floats(0.0, 1.0) | st.sampled_from([0.2, 0.5, 0.8]), max_size=40),
    st.integers(1, 50),
    st.dictionaries(st.integers(1, 300), st.floats(1e-4, 1.0), min_size=1, max_size=12),
)
def test_no_other_number_of_nodes_promises_more_than_enough(
    drafted: list[float], base: int, seconds: dict[int, float]
) -> None:
    """Nodes of one score are taken together, and none for less than 5%."""
    curve = StepTimeCurve(seconds)
    least = min_worthwhile_score(np.array(drafted, np.float32), base, curve.between)
    scores = sorted(np.array(drafted, np.float32).tolist(), reverse=True)
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


@pytest.mark.parametrize(("exponent", "least"), [(0.5, 0.25), (1.0, 0.5), (2.0, math.inf)])
def test_a_node_counts_as_a_power_of_its_score(exponent: float, least: float) -> None:
    """A further token takes 0.4 s; the two nodes count 0.7 and 0.5, 0.5 and 0.25, or 0.25 and 0.06."""
    scores, linear = np.array([0.5, 0.25], np.float32), StepTimeCurve({1: 1.0, 3: 1.8}).between
    assert min_worthwhile_score(scores, 1, linear, exponent) == least


@given(st.lists(st.lists(st.sampled_from([0.2, 0.5, 1.0]), max_size=9), min_size=1, max_size=4), st.integers(1, 9))
def test_every_tree_with_a_node_among_the_best_is_a_further_draft(scores: list[list[float]], base: int) -> None:
    """Of nodes with the same score the first ones are the best."""
    trees = DraftTrees.of([DraftTree.of(range(len(score)), [-1] * len(score), score) for score in scores])
    even, n = StepTimeCurve({1: 1.0, 64: 2.0}).between, trees.tokens.size
    rows = np.repeat(np.arange(len(scores)), [len(score) for score in scores])
    order = np.argsort(-trees.scores, kind="stable")
    drafts = [max(len({*rows[order[:count]].tolist()}) - 1, 0) for count in range(n + 1)]
    found = with_drafts(even, trees, 0.5)
    assert found(base, base + n) == pytest.approx(even(base, base + n) + 0.5 * np.array(drafts))


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 9])
def test_every_size_but_that_of_the_last_step_takes_longer(size: int) -> None:
    linear = StepTimeCurve({1: 1.0, 5: 1.4}).between
    expected = [seconds + 0.2 * (tokens != size) for tokens, seconds in enumerate(linear(2, 5), 2)]
    assert with_change(linear, size, 0.2)(2, 5).tolist() == pytest.approx(expected)


def lists(chains: DraftTrees) -> list[list[int]]:
    """The tokens of each chain."""
    trees = [chains[i] for i in range(len(chains))]
    assert all(tree.parents.tolist() == [*range(-1, len(tree) - 1)] for tree in trees)
    return [tree.tokens.tolist() for tree in trees]


@given(TREES, st.integers(0, 5), st.sampled_from([0.0, 0.2, 0.6]))
def test_no_other_path_is_worth_more(drafts: list[DraftTree], longest: int, least: float) -> None:
    chains = best_chains(DraftTrees.of(drafts), np.full(len(drafts), longest, np.int32), least)
    assert chains.tokens.dtype == np.int32
    for i, (tree, chain) in enumerate(zip(drafts, lists(chains), strict=True)):
        known = [[], *map(list, paths(tree))]
        assert chain in known
        assert len(chain) <= longest
        assert (tree.scores[chain] > 0.0).all()
        np.testing.assert_array_equal(chains.scores[chains.offsets[i] : chains.offsets[i + 1]], tree.scores[chain])
        assert all(tree.scores[chain] >= np.float32(least) - 1e-6)
        worths = [sum(tree.scores[path].astype(float) - least) for path in known if len(path) <= longest]
        assert abs(sum(tree.scores[chain].astype(float) - least) - max(worths)) < 1e-5


@given(TREES, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_chains_that_pay_are_kept_and_others_cut(drafts: list[DraftTree], of_token: float, of_step: float) -> None:
    """The step is at least as good as one without drafts, by the scores and the times that were given."""

    def seconds(fewest: int, most: int) -> Float64Array:
        return np.asarray(1e-3 + of_step + of_token * np.arange(fewest, most + 1))

    chains = worthwhile_chains(DraftTrees.of(drafts), np.full(len(drafts), 8, np.int32), len(drafts), seconds)
    n, rows = len(chains.tokens), len(drafts)
    times = seconds(rows, rows + n)
    assert (rows + chains.scores.sum()) / times[n] >= rows / times[0] * (1 - 1e-6)


def leaves(trees: DraftTrees, kept: set[int]) -> int:
    """Of what is kept, by a plain count."""
    found = 0
    for begin, end in pairwise(trees.offsets):
        inner = {begin + trees.parents[node] for node in range(begin, end) if node in kept}
        found += sum(node in kept and node not in inner for node in range(begin, end))
    return found


@given(TREES)
def test_branches_are_paths_beside_the_first_of_each_tree(drafts: list[DraftTree]) -> None:
    trees = DraftTrees.of(drafts)
    order = np.argsort(-trees.scores, kind="stable").tolist()
    for count, found in enumerate(branches(trees).tolist()):
        kept = {*order[:count]}
        begun = sum(any(begin <= node < end for node in kept) for begin, end in pairwise(trees.offsets))
        assert found == leaves(trees, kept) - begun
    of_each = [max(leaves(DraftTrees.of([tree]), {*range(len(tree))}) - 1, 0) for tree in drafts]
    assert branches_by_row(trees.parents, trees.offsets).tolist() == of_each
    assert branches_in(trees.parents, trees.offsets) == sum(of_each)
    dear = with_branches(seconds, trees, 0.5)(2, 2 + len(trees.tokens))
    assert dear == pytest.approx(seconds(2, 2 + len(trees.tokens)) + 0.5 * branches(trees))
