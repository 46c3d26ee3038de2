"""Chains: the path of each tree that is worth most in its batch."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies import EMPTY_TREE
from draftwood_strategies.arrays import Float32Array, Float64Array, Int32Array
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.draft_engine.step_times import Seconds, StepTimeCurve
from draftwood_strategies.draft_engine.worth import (
    best_chain,
    best_chains,
    branches,
    branches_by_row,
    branches_in,
    min_worthwhile_score,
    with_branches,
    with_change,
    with_drafts,
    worthwhile_branches,
    worthwhile_chains,
)

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
    trees = DraftTrees.of([DraftTree.of(range(len(score)), [-1] * len(score), score) for score in scores])
    even, n = StepTimeCurve({1: 1.0, 64: 2.0}).between, trees.tokens.size
    rows = np.repeat(np.arange(len(scores)), [len(score) for score in scores])
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


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """A tree of up to 12 nodes, each with a token of its own."""
    n = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    scores: list[float] = []
    for parent in parents:
        scores.append((scores[parent] if parent >= 0 else 1.0) * draw(st.integers(0, 4)) / 4)
    return DraftTree.of(np.arange(n), np.array(parents, np.int32), np.array(scores, np.float32))


def paths_of(tree: DraftTree) -> list[list[int]]:
    """Every path from the root, as nodes; the empty one first."""
    found: list[list[int]] = [[]]
    for node, parent in enumerate(tree.parents.tolist()):
        above = next(path for path in found if (path[-1:] or [-1]) == [parent])
        found.append([*above, node])
    return found


def lists(chains: DraftTrees) -> list[list[int]]:
    """The tokens of each chain."""
    trees = [chains[i] for i in range(len(chains))]
    assert all(tree.parents.tolist() == [*range(-1, len(tree) - 1)] for tree in trees)
    return [tree.tokens.tolist() for tree in trees]


def limits(*longest: int) -> Int32Array:
    return np.array(longest, np.int32)


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 5), st.sampled_from([0.0, 0.2, 0.6]))
def test_no_other_path_is_worth_more(drafts: list[DraftTree], longest: int, least: float) -> None:
    chains = best_chains(DraftTrees.of(drafts), limits(*[longest] * len(drafts)), least)
    assert chains.tokens.dtype == np.int32
    for i, (tree, chain) in enumerate(zip(drafts, lists(chains), strict=True)):
        assert chain in paths_of(tree)  # a node's token is its number
        assert len(chain) <= longest
        assert (tree.scores[chain] > 0.0).all()
        np.testing.assert_array_equal(chains.scores[chains.offsets[i] : chains.offsets[i + 1]], tree.scores[chain])
        assert all(tree.scores[chain] >= np.float32(least) - 1e-6)
        worths = [sum(tree.scores[path].astype(float) - least) for path in paths_of(tree) if len(path) <= longest]
        assert abs(sum(tree.scores[chain].astype(float) - least) - max(worths)) < 1e-5


@given(st.lists(trees(), min_size=1, max_size=3), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_chains_that_pay_are_kept_and_others_cut(drafts: list[DraftTree], of_token: float, of_step: float) -> None:
    """The step is at least as good as one without drafts, by the scores and the times that were given."""

    def seconds(fewest: int, most: int) -> Float64Array:
        return np.asarray(1e-3 + of_step + of_token * np.arange(fewest, most + 1))

    chains = worthwhile_chains(DraftTrees.of(drafts), limits(*[8] * len(drafts)), len(drafts), seconds)
    n, rows = len(chains.tokens), len(drafts)
    times = seconds(rows, rows + n)
    assert (rows + chains.scores.sum()) / times[n] >= rows / times[0] * (1 - 1e-6)


def test_a_full_batch_drafts_little_where_tokens_cost_time() -> None:
    tree = DraftTree.of([1, 2, 3, 4], scores=[0.9, 0.7, 0.5, 0.2])

    def seconds(fewest: int, most: int) -> Float64Array:
        return np.asarray(1.0 + 0.1 * np.arange(fewest, most + 1))

    alone = lists(worthwhile_chains(DraftTrees.of([tree]), limits(16), 1, seconds))
    many = lists(worthwhile_chains(DraftTrees.of([tree] * 32), limits(*[16] * 32), 32, seconds))
    assert alone == [[1, 2, 3]]
    assert many == [[1]] * 32


def test_the_path_changes_with_what_tokens_cost() -> None:
    """A long unlikely path has the larger sum; where tokens cost much, a short likely one is worth more."""
    tree = DraftTree.of([1, 2, 3, 4], [-1, 0, 1, -1], [0.4, 0.4, 0.4, 0.6])
    assert lists(best_chains(DraftTrees.of([tree]), limits(8))) == [[1, 2, 3]]
    assert lists(best_chains(DraftTrees.of([tree]), limits(8), 0.35)) == [[4]]


def test_the_best_chain_of_a_tree_is_accepted_furthest() -> None:
    #     1 (0.6)            2 (0.5)
    #     3 (0.1)            4 (0.45)  5 (0.05)
    #                        6 (0.2)
    scores = [0.6, 0.5, 0.45, 0.2, 0.1, 0.05]
    tree = DraftTree.of([1, 2, 4, 6, 3, 5], [-1, -1, 1, 2, 0, 1], scores)
    chain = best_chain(tree)
    assert chain.tokens.tolist() == [2, 4, 6]
    assert chain.parents.tolist() == [-1, 0, 1]
    assert chain.scores.tolist() == pytest.approx([0.5, 0.45, 0.2])
    assert len(best_chain(EMPTY_TREE)) == 0


def random_trees(seed: int, sizes: list[int]) -> DraftTrees:
    random = np.random.default_rng(seed)
    trees = []
    for size in sizes:
        parents = [int(random.integers(-1, i)) if i else -1 for i in range(size)]
        scores: list[float] = []
        for parent in parents:
            scores.append(float(random.uniform(0.3, 0.95)) * (scores[parent] if parent >= 0 else 1.0))
        trees.append(DraftTree.of(range(size), parents, np.array(scores, np.float32)))
    return DraftTrees.of(trees)


def paths(trees: DraftTrees, kept: set[int]) -> int:
    """Leaves of what is kept, by a plain count."""
    found = 0
    for begin, end in pairwise(trees.offsets):
        inner = {begin + trees.parents[node] for node in range(begin, end) if node in kept}
        found += sum(node in kept and node not in inner for node in range(begin, end))
    return found


@given(st.integers(0, 10_000), st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_branches_are_paths_beside_the_first_of_each_tree(seed: int, sizes: list[int]) -> None:
    trees = random_trees(seed, sizes)
    order = np.argsort(-trees.scores, kind="stable").tolist()
    for count, found in enumerate(branches(trees).tolist()):
        kept = {*order[:count]}
        begun = sum(any(begin <= node < end for node in kept) for begin, end in pairwise(trees.offsets))
        assert found == paths(trees, kept) - begun
    assert branches(trees)[-1] == branches_in(trees.parents, trees.offsets)
    of_each = [
        max(paths(DraftTrees.of([tree]), {*range(len(tree))}) - 1, 0)
        for tree in map(trees.__getitem__, range(len(trees)))
    ]
    assert branches_by_row(trees.parents, trees.offsets).tolist() == of_each


def seconds(fewest: int, most: int) -> Float64Array:
    return np.asarray(1.0 + 0.05 * np.arange(fewest, most + 1), np.float64)


BUSH = DraftTree.of([1, 2, 3, 4, 5], [-1, 0, 1, -1, 3], np.array([0.6, 0.5, 0.3, 0.4, 0.25], np.float32))
"""A chain of three, and another one of two beside it."""


def test_branches_that_cost_nothing_stay() -> None:
    trees = DraftTrees.of([BUSH])
    assert worthwhile_branches(trees, 1, seconds, 0.0) is trees
    assert worthwhile_branches(trees, 1, seconds, 0.001) is trees
    nothing = DraftTrees.of([EMPTY_TREE, EMPTY_TREE])
    assert worthwhile_branches(nothing, 2, seconds, 2.0) is nothing


def test_chains_are_offered_where_branches_cost_more_than_they_bring() -> None:
    trees = DraftTrees.of([BUSH, DraftTree.of([7])])
    chains = worthwhile_branches(trees, 2, seconds, 2.0)
    assert [chains[row].tokens.tolist() for row in range(2)] == [[1, 2, 3], [7]]
    assert [chains[row].parents.tolist() for row in range(2)] == [[-1, 0, 1], [-1]]
    # The second best node begins the branch, so the tree is worth no more than its first node.
    small = DraftTrees.of([DraftTree.of([1, 2, 3], [-1, 0, -1], np.array([0.5, 0.4, 0.45], np.float32))])
    assert worthwhile_branches(small, 1, seconds, 2.0).tokens.tolist() == [1, 2]


def test_the_budget_takes_nodes_of_a_branch_only_if_they_pay_for_it() -> None:
    trees = DraftTrees.of([BUSH])
    free = min_worthwhile_score(trees.scores, 1, seconds)
    dear = min_worthwhile_score(trees.scores, 1, with_branches(seconds, trees, 0.5))
    assert free <= 0.25
    assert 0.4 < dear <= 0.5
