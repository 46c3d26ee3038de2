"""Unused nodes of a draft: what fills them, and that regular nodes stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies import DraftTree, Feedback, HybridStrategy, RecyclingStrategy
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.mixing.candidates import TABLE
from draftwood_strategies.mixing.drafting import MixedDraft, fill
from tests.strategies.arrays import ids
from tests.strategies.toy_model import ToyModel, run


def tree_of(draft: MixedDraft, size: int) -> DraftTree:
    tree = DraftTree(draft.tokens[:size], draft.parents[:size], draft.scores[:size])
    tree.check()
    return tree


def filled(regular: DraftTree, top_tokens: list[list[int]], budget: int) -> tuple[DraftTree, Int32Array]:
    """A draft with the regular nodes, filled up to the budget, and the source of each node."""
    tokens, parents, sources = np.empty((3, budget), np.int32)
    draft, n = MixedDraft(tokens, parents, np.empty(budget, np.float32), sources), len(regular)
    draft.tokens[:n], draft.parents[:n], draft.scores[:n] = regular.tokens, regular.parents, regular.scores
    draft.sources[:n] = 0
    top = np.array(top_tokens, np.int32).reshape(len(top_tokens), len(top_tokens[0]) if top_tokens else 0)
    size = fill(top, draft, n, budget)
    return tree_of(draft, size), draft.sources[:size]


@st.composite
def regular_trees(draw: st.DrawFn) -> DraftTree:
    """Up to ten nodes, siblings distinct, each with at most half of what its siblings before it leave."""
    left, paths, rows = [1.0], set[tuple[int, int]](), list[tuple[int, int, float]]()
    for _ in range(draw(st.integers(0, 10))):
        parent, token = draw(st.integers(-1, len(rows) - 1)), draw(st.integers(0, 12))
        if (parent, token) not in paths:
            score = left[parent + 1] * draw(st.floats(0.0, 0.5))
            left[parent + 1] -= score
            left.append(score)
            paths.add((parent, token))
            rows.append((token, parent, score))
    tokens, parents, scores = zip(*rows, strict=True) if rows else ((), (), ())
    return DraftTree.of(tokens, parents, scores)


@given(regular_trees(), st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), max_size=30), st.integers(1, 40))
def test_filling_adds_nodes_and_keeps_regular_ones(regular: DraftTree, top_tokens: list[list[int]], spare: int) -> None:
    budget = len(regular) + spare
    tree, sources = filled(regular, top_tokens, budget)
    n = len(regular)
    assert tree.pruned(budget) is tree
    assert (tree.tokens[:n] == regular.tokens).all()
    assert (tree.parents[:n] == regular.parents).all()
    assert (tree.scores[:n] == regular.scores).all()
    assert (sources[n:] == TABLE).all()
    roots, tops = tree.tokens[tree.parents == -1].tolist(), {token for row in top_tokens for token in row}
    assert (tree.parents[n:] == -1).all()
    assert set(tree.tokens[n:].tolist()) <= tops
    assert len(tree) == budget or tops <= set(roots), "a node is left unused although there is a token for it"
    assert len(set(roots)) == len(roots)
    again, _ = filled(regular, top_tokens, budget)
    assert (tree.tokens == again.tokens).all()


def test_filled_nodes_are_no_more_probable_than_what_the_others_leave() -> None:
    tree, _ = filled(DraftTree.of([1, 2], [-1, 0], [0.9, 0.3]), [[5, 6, 7]], 40)
    for node, score in zip(range(-1, len(tree)), [1.0, *tree.scores.tolist()], strict=True):
        assert tree.scores[tree.parents == node].sum() <= score * (1 + 1e-6)


def test_tokens_of_better_ranks_come_first() -> None:
    tree, _ = filled(DraftTree.of([]), [[1, 2, 3], [1, 3, 2], [4, 3, 5]], 4)
    assert tree.tokens.tolist() == [1, 4, 2, 3]
    assert tree.scores == pytest.approx([0.07, 0.035, 0.07 / 3, 0.0175])


def test_a_token_at_the_root_is_not_drafted_twice() -> None:
    tree, _ = filled(DraftTree.of([5, 6], [-1, 0], [0.6, 0.3]), [[5, 6]], 8)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([5, 6, 6], [-1, 0, -1])
    assert tree.scores[2] == pytest.approx(0.4 * 0.07)


def test_a_full_draft_stays_as_it_is() -> None:
    regular = DraftTree.of([1, 2], [-1, 0], [0.9, 0.3])
    assert len(filled(regular, [[5, 6, 7]], 2)[0]) == 2


def test_an_unknown_context_is_drafted_from_the_latest_step() -> None:
    drafter = RecyclingStrategy().start(ids(1))
    assert len(drafter.propose(8)) == 0, "there was no step yet"
    drafter.observe(ids(9), Feedback(ids(1), ids(-1), ids(9), np.arange(9, 17, dtype=np.int32)[None]))
    assert sorted(drafter.propose(8).tokens.tolist()) == list(range(9, 17)), "the table has no row for 9"
    drafter.observe(ids(10), None)
    assert len(drafter.propose(8)) == 0, "the latest step has no feedback"


def test_without_a_table_nothing_is_filled() -> None:
    drafter = HybridStrategy(sources="trie").start(ids(1))
    drafter.observe(ids(9), Feedback(ids(1), ids(-1), ids(9), np.arange(9, 17, dtype=np.int32)[None]))
    assert len(drafter.propose(8)) == 0


def test_a_pruned_tree_and_feedback_without_top_tokens() -> None:
    strategy, model, text = RecyclingStrategy(), ToyModel(), [1, 2]
    drafter = strategy.start(ids(*text))
    for step in range(60):
        tree = drafter.propose(24)
        tree.check()
        accepted, feedback = model.verify(text, tree.pruned(step % 5), 0 if step % 7 == 3 else 8)
        drafter.observe(np.array(accepted, np.int32), feedback)
        text += accepted


def test_the_first_answer_takes_fewer_steps() -> None:
    """All nodes that are free are used from the second step on."""
    model, drafter = ToyModel(4), RecyclingStrategy().start(ids(3, 4))
    assert np.mean(run(model, drafter, [3, 4], 60, 63)) > 2.0
