"""Branches of draft trees, where a path costs something beside its nodes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies import EMPTY_TREE, DraftTree
from draftwood_strategies.budgeting.budget import min_worthwhile_score
from draftwood_strategies.budgeting.chains import (
    branches,
    branches_by_row,
    branches_in,
    with_branches,
    worthwhile_branches,
)
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.native import Float64Array


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
