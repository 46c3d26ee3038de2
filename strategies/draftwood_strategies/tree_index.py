"""The children of the nodes of a tree: looked up by token, and trees merged by shared prefix; and the frontier of a
draft: the nodes that may be drafted next.

Trees come as `tokens` and `parents`, int32[n] each, a parent before its children; `NO_NODE` is the parent of the first
level. Children are chained as in any trie of first-child and next-sibling links.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from draftwood_strategies.arrays import Float32Array, Int32Array, Integer, Real
from draftwood_strategies.native import compiled, copy_record, record_dtype

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


_ANY_TOKEN = 2**31


class MalformedTreeError(ValueError):
    """A draft tree violates an invariant; the message names the invariant, the node and the value."""


_INVARIANTS = (
    "",
    "a parent comes before its child and is at least -1",
    "a token is not negative and below the vocabulary size",
    "a score lies in [0, 1]",
    "a score never grows along a path",
    "siblings carry different tokens",
)


def check_trees(
    tokens: Int32Array, parents: Int32Array, scores: Float32Array, offsets: Int32Array | None, vocab_size: int | None
) -> None:
    """Checks several trees in flat arrays, as in `draft.DraftTrees`; one tree, where `offsets` is None.

    Raises:
        MalformedTreeError: an array has another type or length, or a tree violates an invariant.
    """
    for name, array, dtype in (
        ("tokens", tokens, np.int32),
        ("parents", parents, np.int32),
        ("scores", scores, np.float32),
    ):
        check_array(name, array, dtype)
    lengths = (len(tokens), len(parents), len(scores))
    if len(set(lengths)) > 1:
        raise MalformedTreeError(f"tokens, parents and scores must be of one length, not {lengths}")
    index = np.empty(lengths[0] + 1, LINKED_NODE)
    limit = _ANY_TOKEN if vocab_size is None else vocab_size
    bounds = np.array([0, lengths[0]], np.int32) if offsets is None else offsets
    violated, tree, node = _first_violation(tokens, parents, scores, bounds, limit, index)
    if violated:
        at, which = bounds[tree] + node, "" if offsets is None else f"tree {tree}: "
        raise MalformedTreeError(
            f"{which}{_INVARIANTS[violated]}, but node {node} has token {tokens[at]}, parent {parents[at]},"
            f" score {scores[at]}"
        )


def check_array(name: str, array: Any, dtype: npt.DTypeLike) -> None:
    """Raises MalformedTreeError if this is not an array of one dimension and this type."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        shown = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise MalformedTreeError(f"{name} must be a {np.dtype(dtype).name}[n] array, not {shown}")


@compiled
def _first_violation(
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    offsets: Int32Array,
    vocab_size: int,
    index: TreeIndex,
) -> tuple[int, int, int]:
    """Index into `_INVARIANTS`, the tree and its node, or (0, 0, 0). `index` is workspace for the largest tree."""
    for s in range(offsets.shape[0] - 1):
        begin = offsets[s]
        index[0].first_child = NO_NODE
        for i in range(offsets[s + 1] - begin):
            token, parent, score = tokens[begin + i], parents[begin + i], scores[begin + i]
            if parent < NO_NODE or parent >= i:
                return 1, s, i
            if token < 0 or token >= vocab_size:
                return 2, s, i
            if not 0.0 <= score <= 1.0:
                return 3, s, i
            if parent >= 0 and score > scores[begin + parent]:
                return 4, s, i
            if find_child(index, parent, token) >= 0:
                return 5, s, i
            index[i + 1].token = token
            link(index, i, parent)
    return 0, 0, 0
