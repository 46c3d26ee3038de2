"""The children of the nodes of a tree: looked up by token, and trees merged by shared prefix; and the frontier of a
draft: the nodes that may be drafted next.

Trees come as `tokens` and `parents`, int32[n] each, a parent before its children; `NO_NODE` is the parent of the first
level. Children are chained as in any trie of first-child and next-sibling links.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np

from draftwood_strategies.native import Int32Array, Integer, Real, compiled
from draftwood_strategies.structs import copy_record, record_dtype

NO_NODE = -1
"""The parent of a node of the first level; the child of a node that has none."""

LINKED_NODE = record_dtype(token=np.int32, first_child=np.int32, next_sibling=np.int32)
"""A node's token, its latest child, and the sibling that was linked before it; `NO_NODE` for none."""
TreeIndex: TypeAlias = Annotated[Any, LINKED_NODE]
"""LINKED_NODE[m + 1], a tree of up to m nodes: node i is entry i + 1, and the first child of entry 0 is the latest
node of the first level."""


def unlinked(tokens: Int32Array) -> TreeIndex:
    """An index of nodes with these tokens, int32[m], for `link` to link one after the other."""
    index = np.empty(tokens.shape[0] + 1, LINKED_NODE)
    index["token"][1:] = tokens
    index["first_child"][0] = NO_NODE
    return index


@compiled
def link(index: TreeIndex, node: Integer, parent: Integer) -> None:
    """Makes `node` a child of `parent`."""
    index[node + 1].next_sibling = index[parent + 1].first_child
    index[parent + 1].first_child = node
    index[node + 1].first_child = NO_NODE


@compiled
def link_all(index: TreeIndex, parents: Int32Array) -> None:
    """Links all nodes of an `unlinked` index."""
    for node in range(parents.shape[0]):
        link(index, node, parents[node])


@compiled
def find_child(index: TreeIndex, parent: Integer, token: Integer) -> int:
    """The child of `parent` that carries `token`; `NO_NODE` for none."""
    child = int(index[parent + 1].first_child)
    while child >= 0 and index[child + 1].token != token:
        child = int(index[child + 1].next_sibling)
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
        if node < 0 and size < index.shape[0] - 1:
            node = size
            size += 1
            index[node + 1].token = tokens[i]
            link(index, node, above)
        located[i] = node
    return size


FRONTIER_ENTRY = record_dtype(score=np.float32, node=np.int32)
"""A node's score and its number."""
Frontier: TypeAlias = Annotated[Any, FRONTIER_ENTRY]
"""FRONTIER_ENTRY[k]; the frontier are those from `begin` to `end`, the best score first."""


@compiled
def takes(frontier: Frontier, begin: int, end: int, wanted: Integer, score: Real) -> bool:
    """Whether a node of this score is among the `wanted` best."""
    return bool(end - begin < wanted or score > frontier[end - 1].score)


@compiled
def offer(frontier: Frontier, begin: int, end: int, wanted: Integer, score: Real, node: Integer) -> int:
    """Puts a node into the frontier if it is among the `wanted` best; returns the new end."""
    if not takes(frontier, begin, end, wanted, score):
        return end
    if end - begin == wanted:
        end -= 1
    at = end
    while at > begin and frontier[at - 1].score < score:
        copy_record(frontier[at], frontier[at - 1])
        at -= 1
    frontier[at].score = score
    frontier[at].node = node
    return end + 1
