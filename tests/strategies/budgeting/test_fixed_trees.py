"""Trees of one fixed size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies.budgeting.fixed_trees import fixed_trees
from draftwood_strategies.draft import DraftTree, DraftTrees


@st.composite
def drafts(draw: st.DrawFn) -> tuple[int, list[DraftTree | None]]:
    nodes = draw(st.integers(2, 9))
    trees: list[DraftTree | None] = []
    for size in draw(st.lists(st.none() | st.integers(0, nodes - 1), min_size=1, max_size=5)):
        if size is None:
            trees.append(None)
            continue
        parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
        trees.append(DraftTree.of(range(10, 10 + size), parents))
    return nodes, trees


@given(drafts())
def test_nodes_are_those_of_the_drafts_below_the_last_token(given: tuple[int, list[DraftTree | None]]) -> None:
    nodes, trees = given
    rows = [row for row, tree in enumerate(trees) if tree is not None]
    present = [tree for tree in trees if tree is not None]
    last = np.arange(1000, 1000 + len(trees))
    tokens, mask = fixed_trees(last, nodes, rows, DraftTrees.of(present) if present else None)
    for row, tree in enumerate(trees):
        drafted = [] if tree is None else tree.tokens.tolist()
        unused = nodes - 1 - len(drafted)
        assert tokens.reshape(-1, nodes)[row].tolist() == [1000 + row, *drafted, *[0] * unused]
        above = [-1] if tree is None else [-1, *(parent + 1 for parent in tree.parents.tolist())]
        above += [0] * (nodes - len(above))
        for node in range(nodes):
            path, at = set(), node
            while at >= 0:
                path.add(at)
                at = above[at]
            assert np.flatnonzero(mask.reshape(-1, nodes, nodes)[row, node]).tolist() == sorted(path)


def test_there_may_be_no_sequence() -> None:
    tokens, mask = fixed_trees(np.empty(0, np.int64), 8, [], None)
    assert (tokens.shape, mask.shape) == ((0,), (0,))
