"""Invariants of draft trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwood_strategies import DraftTree, MalformedTreeError
from draftwood_strategies.draft import merged
from draftwood_strategies.tree_index import NO_NODE, link_all, locate, unlinked


@st.composite
def trees(draw: st.DrawFn, largest: int = 24) -> DraftTree:
    """Valid trees of up to `largest` nodes over few tokens, so that they often share prefixes."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    taken: set[tuple[int, int]] = set()
    for node in range(draw(st.integers(0, largest))):
        parent, token = draw(st.integers(-1, node - 1)), draw(st.integers(0, 5))
        while (parent, token) in taken:
            parent, token = draw(st.integers(-1, node - 1)), draw(st.integers(0, 100))
        taken.add((parent, token))
        above = scores[parent] if parent >= 0 else 1.0
        tokens.append(token)
        parents.append(parent)
        scores.append(float(np.float32(above * draw(st.sampled_from([1.0, 0.5, 0.1, 0.0])))))
    return DraftTree.of(tokens, parents, scores)


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Every path from the root, with the score of its last node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, tree.scores.tolist(), strict=True))


@given(trees(), st.integers(0, 30))
def test_pruning_keeps_the_best_nodes_as_a_tree(tree: DraftTree, budget: int) -> None:
    pruned = tree.pruned(budget)
    pruned.check()
    assert len(pruned) == min(budget, len(tree))
    assert paths(pruned).items() <= paths(tree).items()
    best = sorted(tree.scores.tolist(), reverse=True)[:budget]
    assert sorted(pruned.scores.tolist(), reverse=True) == best


@given(st.lists(trees(12), max_size=4), st.integers(0, 30))
@settings(suppress_health_check=[HealthCheck.data_too_large])
def test_merging_is_the_union_of_paths_with_the_best_scores(parts: list[DraftTree], capacity: int) -> None:
    """A full tree leaves out the nodes that come last; scores of nodes that are there already still count."""
    whole = merged(parts)
    whole.check()
    expected: dict[tuple[int, ...], float] = {}
    for part in parts:
        for path, score in paths(part).items():
            expected[path] = max(score, expected.get(path, 0.0))
    assert paths(whole) == expected
    tree = merged(parts, capacity)
    for made, of_whole in ((tree.tokens, whole.tokens), (tree.parents, whole.parents), (tree.scores, whole.scores)):
        assert made.tolist() == of_whole[:capacity].tolist()


@given(trees(), trees())
def test_nodes_are_located_by_their_paths(indexed: DraftTree, tree: DraftTree) -> None:
    index, located = unlinked(indexed.tokens), np.empty(len(tree), np.int32)
    link_all(index, indexed.parents)
    locate(index, NO_NODE, tree.tokens, tree.parents, located)
    nodes = {path: node for node, path in enumerate(paths(indexed))}
    assert located.tolist() == [nodes.get(path, NO_NODE) for path in paths(tree)]


@pytest.mark.parametrize(
    ("tokens", "parents", "scores", "invariant"),
    [
        ([1, 2], [-1, 1], [1, 1], "a parent comes before its child"),
        ([1, 2], [-2, 0], [1, 1], "at least -1"),
        ([1, -2], [-1, 0], [1, 1], "not negative"),
        ([1, 2], [-1, 0], [1, 1.5], r"lies in \[0, 1\]"),
        ([1, 2], [-1, 0], [1, -0.5], r"lies in \[0, 1\]"),
        ([1, 2], [-1, 0], [1, float("nan")], r"lies in \[0, 1\]"),
        ([1, 2], [-1, 0], [0.5, 0.6], "never grows along a path"),
        ([1, 1], [-1, -1], [0.5, 0.5], "siblings carry different tokens"),
        ([1, 2, 2], [-1, 0, 0], [0.5, 0.5, 0.5], "siblings carry different tokens"),
        ([1, 2], [-1], [1, 1], "one length"),
    ],
)
def test_a_broken_invariant_is_named(
    tokens: list[int], parents: list[int], scores: list[float], invariant: str
) -> None:
    with pytest.raises(MalformedTreeError, match=invariant):
        DraftTree.of(tokens, parents, scores)


def test_arrays_of_the_wrong_type_and_tokens_outside_the_vocabulary_are_refused() -> None:
    tree = DraftTree.of([3, 4])
    tree.check(vocab_size=5)
    with pytest.raises(MalformedTreeError, match="below the vocabulary size"):
        tree.check(vocab_size=4)
    with pytest.raises(MalformedTreeError, match=r"tokens must be a int32\[n\] array, not int64"):
        DraftTree(np.array([1]), tree.parents[:1], tree.scores[:1]).check()
    with pytest.raises(MalformedTreeError, match="scores must be a float32"):
        DraftTree(tree.tokens, tree.parents, [1.0, 1.0]).check()  # type: ignore[arg-type]
