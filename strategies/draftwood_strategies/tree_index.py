"""The children of the nodes of a tree: looked up by token, and trees merged by shared prefix.

Trees come as `tokens` and `parents`, int32[n] each, a parent before its children; `NO_NODE` is the parent of the first
level. Children are chained as in any trie of first-child and next-sibling links.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draftwood_strategies.native import Int32Array, Integer, compiled

NO_NODE = -1
"""The parent of a node of the first level; the child of a node that has none."""


class TreeIndex(NamedTuple):
    """A tree of up to m nodes, with the links to the children of each.

    Attributes:
        tokens: int32[m], the token at each node.
        first_child: int32[m + 1], the latest child of `NO_NODE` and of each node; `NO_NODE` for none.
        next_sibling: int32[m], the sibling that was linked before each node; `NO_NODE` for none.
    """

    tokens: Int32Array
    first_child: Int32Array
    next_sibling: Int32Array


def unlinked(tokens: Int32Array) -> TreeIndex:
    """An index over tokens that are there already, int32[m], for `link` to link one after the other."""
    n = tokens.shape[0]
    index = TreeIndex(tokens, np.empty(n + 1, np.int32), np.empty(n, np.int32))
    index.first_child[0] = NO_NODE
    return index


@compiled
def link(index: TreeIndex, node: Integer, parent: Integer) -> None:
    """Makes `node` a child of `parent`."""
    index.next_sibling[node] = index.first_child[parent + 1]
    index.first_child[parent + 1] = node
    index.first_child[node + 1] = NO_NODE


@compiled
def link_all(index: TreeIndex, parents: Int32Array) -> None:
    """Links all nodes of an `unlinked` index."""
    for node in range(parents.shape[0]):
        link(index, node, parents[node])


@compiled
def find_child(index: TreeIndex, parent: Integer, token: Integer) -> int:
    """The child of `parent` that carries `token`; `NO_NODE` for none."""
    child = int(index.first_child[parent + 1])
    while child >= 0 and index.tokens[child] != token:
        child = int(index.next_sibling[child])
    return child


@compiled
def locate(index: TreeIndex, root: Integer, tokens: Int32Array, parents: Int32Array, located: Int32Array) -> None:
    """Finds the nodes of a tree in the indexed one.

    Args:
        root: the node of the index under which the tree's first level is looked for.
        tokens, parents: int32[n], the tree; its siblings may be equal.
        located: int32[n or more], set to the node of the index with the same path; `NO_NODE` for none.
    """
    for i in range(tokens.shape[0]):
        above: Integer = located[parents[i]] if parents[i] >= 0 else root
        known = parents[i] < 0 or above >= 0
        located[i] = find_child(index, above, tokens[i]) if known else NO_NODE


@compiled
def insert(index: TreeIndex, size: int, tokens: Int32Array, parents: Int32Array, located: Int32Array) -> int:
    """Merges a tree into the index by shared prefix, as far as there is space.

    Args:
        size: how many nodes the index has.
        tokens, parents: int32[n], the tree; its siblings may be equal.
        located: int32[n or more], set to the node of the index with the same path; `NO_NODE` where the index is full.

    Returns:
        The new size.
    """
    for i in range(tokens.shape[0]):
        above: Integer = located[parents[i]] if parents[i] >= 0 else NO_NODE
        located[i] = NO_NODE
        if parents[i] >= 0 and above < 0:
            continue
        node = find_child(index, above, tokens[i])
        if node < 0 and size < index.tokens.shape[0]:
            node = size
            size += 1
            index.tokens[node] = tokens[i]
            link(index, node, above)
        located[i] = node
    return size
