"""Chains: the path of each tree that is worth most in its batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies import EMPTY_TREE, DraftTree
from draftwood_strategies.budgeting.chains import best_chain, best_chains, worthwhile_chains
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.native import Float64Array, Int32Array


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


def limits(*longest: int) -> Int32Array:
    return np.array(longest, np.int32)


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 5), st.sampled_from([0.0, 0.2, 0.6]))
def test_no_other_path_is_worth_more(drafts: list[DraftTree], longest: int, least: float) -> None:
    chains = best_chains(DraftTrees.of(drafts), limits(*[longest] * len(drafts)), least)
    assert chains.tokens.dtype == np.int32
    for i, (tree, chain) in enumerate(zip(drafts, chains.lists(), strict=True)):
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

    alone = worthwhile_chains(DraftTrees.of([tree]), limits(16), 1, seconds).lists()
    many = worthwhile_chains(DraftTrees.of([tree] * 32), limits(*[16] * 32), 32, seconds).lists()
    assert alone == [[1, 2, 3]]
    assert many == [[1]] * 32


def test_the_path_changes_with_what_tokens_cost() -> None:
    """A long unlikely path has the larger sum; where tokens cost much, a short likely one is worth more."""
    tree = DraftTree.of([1, 2, 3, 4], [-1, 0, 1, -1], [0.4, 0.4, 0.4, 0.6])
    assert best_chains(DraftTrees.of([tree]), limits(8)).lists() == [[1, 2, 3]]
    assert best_chains(DraftTrees.of([tree]), limits(8), 0.35).lists() == [[4]]


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
