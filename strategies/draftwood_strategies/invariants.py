"""The invariants of draft trees, checked on their arrays. See `draft.DraftTree`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from draftwood_strategies.native import Float32Array, Int32Array, compiled
from draftwood_strategies.tree_index import LINKED_NODE, NO_NODE, TreeIndex, find_child, link

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
    most = _ANY_TOKEN if vocab_size is None else vocab_size
    bounds = np.array([0, lengths[0]], np.int32) if offsets is None else offsets
    violated, tree, node = _first_violation(tokens, parents, scores, bounds, most, index)
    if violated:
        at, which = bounds[tree] + node, "" if offsets is None else f"tree {tree}: "
        raise MalformedTreeError(
            f"{which}{_INVARIANTS[violated]}, but node {node} has token {tokens[at]}, parent {parents[at]},"
            f" score {scores[at]}"
        )


def check_array(name: str, array: Any, dtype: npt.DTypeLike) -> None:
    """Raises MalformedTreeError if this is not an array of one dimension and this type."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise MalformedTreeError(f"{name} must be a {np.dtype(dtype).name}[n] array, not {found}")


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
