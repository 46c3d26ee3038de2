"""Child look-up and merging, against dictionaries of paths."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies import DraftTree
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.tree_index import NO_NODE, find_child, insert, link_all, locate, unlinked
from tests.strategies.test_draft import paths, trees


def numbered_paths(tree: DraftTree) -> dict[tuple[int, ...], int]:
    return {path: node for node, path in enumerate(paths(tree))}


def located_in(indexed: DraftTree, tree: DraftTree) -> Int32Array:
    index, located = unlinked(indexed.tokens), np.empty(len(tree), np.int32)
    link_all(index, indexed.parents)
    locate(index, NO_NODE, tree.tokens, tree.parents, located)
    return located


@given(trees())
def test_each_child_is_found_by_its_token(tree: DraftTree) -> None:
    index, nodes = unlinked(tree.tokens), numbered_paths(tree)
    link_all(index, tree.parents)
    for path, node in {(): NO_NODE, **nodes}.items():
        for token in range(7):
            assert find_child(index, node, token) == nodes.get((*path, token), NO_NODE)


@given(trees(), trees())
def test_nodes_are_located_by_their_paths(indexed: DraftTree, tree: DraftTree) -> None:
    nodes = numbered_paths(indexed)
    assert located_in(indexed, tree).tolist() == [nodes.get(path, NO_NODE) for path in paths(tree)]


@given(st.lists(trees(), max_size=2), st.integers(0, 40))
def test_insertion_shares_prefixes_and_stops_at_the_capacity(parts: list[DraftTree], capacity: int) -> None:
    index, size, expected = unlinked(np.empty(capacity, np.int32)), 0, dict[tuple[int, ...], int]()
    for part in parts:
        located = np.empty(len(part), np.int32)
        size = insert(index, size, part.tokens, part.parents, located)
        for path in paths(part):
            if len(expected) < capacity and (len(path) == 1 or path[:-1] in expected):
                expected.setdefault(path, len(expected))
        assert located.tolist() == [expected.get(path, NO_NODE) for path in paths(part)]
        assert size == len(expected)
    assert [path[-1] for path in expected] == index["token"][1 : size + 1].tolist()
