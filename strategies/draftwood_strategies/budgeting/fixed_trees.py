"""Draft trees of one fixed size, for engines that verify the same number of nodes for each sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.native import Int32Array, Int64Array, compiled

BoolArray = npt.NDArray[np.bool_]


class FixedTrees(NamedTuple):
    """The trees of s sequences, each with n nodes, of which node 0 is the sequence's last token.

    Attributes:
        tokens: int64[s * n].
        mask: bool[s * n * n]; entry (i, j) of a tree says whether node j is node i or above it.
    """

    tokens: Int64Array
    mask: BoolArray


def fixed_trees(last_tokens: Int64Array, nodes: int, rows: SequenceOf[int], trees: DraftTrees | None) -> FixedTrees:
    """Trees of exactly so many nodes.

    Nodes that a draft leaves unused have token 0 and hang from node 0. They are verified like others.

    Args:
        last_tokens: int64[s].
        rows: int[t], the sequence of each tree of `trees`, which has at most `nodes` - 1 nodes; others have no draft.
    """
    sequences = last_tokens.shape[0]
    tokens = np.zeros(sequences * nodes, np.int64)
    tokens[::nodes] = last_tokens
    mask = np.zeros(sequences * nodes * nodes, np.bool_)
    _begin(mask, nodes)
    if trees is not None:
        _lay_out(np.asarray(rows, np.int32), trees.tokens, trees.parents, trees.begins, nodes, tokens, mask)
    return FixedTrees(tokens, mask)


@compiled
def _begin(mask: BoolArray, nodes: int) -> None:
    """Each node below node 0."""
    for row in range(mask.shape[0] // nodes):
        at = row * nodes
        mask[at] = True
        mask[at + row % nodes] = True


@compiled
def _lay_out(
    rows: Int32Array,
    tree_tokens: Int32Array,
    parents: Int32Array,
    begins: Int32Array,
    nodes: int,
    tokens: Int64Array,
    mask: BoolArray,
) -> None:
    for t in range(rows.shape[0]):
        first, begin = rows[t] * nodes, begins[t]
        for i in range(begins[t + 1] - begin):
            node, above = first + i + 1, first + parents[begin + i] + 1
            tokens[node] = tree_tokens[begin + i]
            for j in range(i + 1):
                mask[node * nodes + j] = mask[above * nodes + j]
