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
from tests.strategies.test_draft import trees
from tests.strategies.toy_model import ToyModel


def filled(regular: DraftTree, top_tokens: list[list[int]], budget: int) -> tuple[DraftTree, Int32Array]:
    """A draft with the regular nodes, filled up to the budget, and the source of each node."""
    tokens, parents, sources = np.empty((3, budget), np.int32)
    draft, n = MixedDraft(tokens, parents, np.empty(budget, np.float32), sources), len(regular)
    draft.tokens[:n], draft.parents[:n], draft.scores[:n] = regular.tokens, regular.parents, regular.scores
    draft.sources[:n] = 0
    top = np.array(top_tokens, np.int32).reshape(len(top_tokens), len(top_tokens[0]) if top_tokens else 0)
    size = fill(top, draft, n, budget)
    tree = DraftTree(draft.tokens[:size], draft.parents[:size], draft.scores[:size])
    tree.check()
    return tree, draft.sources[:size]


@given(trees(10), st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), max_size=30), st.integers(0, 40))
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
    regular_chance = float(regular.scores[regular.parents == -1].sum())
    assert tree.scores[tree.parents == -1].sum() <= max(1.0, regular_chance) + 1e-5, "what regular nodes leave"


def test_tokens_of_better_ranks_come_first() -> None:
    tree, _ = filled(DraftTree.of([]), [[1, 2, 3], [1, 3, 2], [4, 3, 5]], 4)
    assert tree.tokens.tolist() == [1, 4, 2, 3]
    assert tree.scores == pytest.approx([0.07, 0.035, 0.07 / 3, 0.0175])


@pytest.mark.parametrize(("sources", "filled"), [("recycling", [*range(9, 17)]), ("trie", [])])
def test_an_unknown_context_is_drafted_from_the_latest_step_if_there_is_a_table(
    sources: str, filled: list[int]
) -> None:
    drafter = HybridStrategy(sources=sources).start(ids(1))
    assert len(drafter.propose(8)) == 0, "there was no step yet"
    drafter.observe(ids(9), Feedback(ids(1), ids(-1), ids(9), np.arange(9, 17, dtype=np.int32)[None]))
    assert sorted(drafter.propose(8).tokens.tolist()) == filled, "the table has no row for 9"
    drafter.observe(ids(10), None)
    assert len(drafter.propose(8)) == 0, "the latest step has no feedback"


def test_a_pruned_tree_and_feedback_without_top_tokens() -> None:
    strategy, model, text = RecyclingStrategy(), ToyModel(), [1, 2]
    drafter = strategy.start(ids(*text))
    for step in range(60):
        tree = drafter.propose(24)
        tree.check()
        accepted, feedback = model.verify(text, tree.pruned(step % 5), 0 if step % 7 == 3 else 8)
        drafter.observe(np.array(accepted, np.int32), feedback)
        text += accepted
