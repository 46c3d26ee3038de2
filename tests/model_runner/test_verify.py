from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from model_runner.verify import walk
from strategies import EMPTY_TREE, DraftTree
from strategies.draft import ROOT


def test_without_a_draft_the_models_own_token_is_written() -> None:
    assert list(walk(EMPTY_TREE, lambda node: 42)) == [(42, ROOT)]


def test_takes_the_branch_that_the_model_chooses() -> None:
    tree = DraftTree.of([5, 6, 7, 8], [-1, -1, 1, 1], [0.5, 0.4, 0.2, 0.1])
    choices = {ROOT: 6, 1: 8, 3: 9}
    assert list(walk(tree, choices.__getitem__)) == [(6, 1), (8, 3), (9, ROOT)]


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    edges = draw(st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 3)), max_size=30))
    seen: list[tuple[int, int]] = []
    for parent, token in edges:
        if parent < len(seen) and (parent, token) not in seen:
            seen.append((parent, token))
    return DraftTree.of([t for _, t in seen], [p for p, _ in seen], [0.5] * len(seen))


@given(trees(), st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_what_is_written_does_not_depend_on_the_tree(tree: DraftTree, truth: list[int]) -> None:
    """A model that writes `truth` writes a beginning of it, and the nodes on the way carry exactly that."""
    depths = {ROOT: -1, **dict(enumerate(tree.depths.tolist()))}
    steps = list(walk(tree, lambda node: truth[depths[node] + 1]))
    assert [token for token, _ in steps] == truth[: len(steps)]
    nodes = [node for _, node in steps]
    assert nodes[-1] == ROOT
    assert ROOT not in nodes[:-1]
    assert [tree.tokens[n] for n in nodes[:-1]] == truth[: len(nodes) - 1]
    assert [int(tree.parents[n]) for n in nodes[:-1]] == [ROOT, *nodes[:-2]][: len(nodes) - 1]
