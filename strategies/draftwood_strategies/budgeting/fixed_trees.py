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
    tokens, mask = np.empty(sequences * nodes, np.int64), np.empty(sequences * nodes * nodes, np.bool_)
    drafts = _NO_TREES if trees is None else trees
    of_trees = np.array(rows, np.int32)
    _lay_out(last_tokens, of_trees, drafts.tokens, drafts.parents, drafts.offsets, nodes, tokens, mask)
    return FixedTrees(tokens, mask)


_NO_TREES = DraftTrees.empty(0)


@compiled
def _lay_out(
    last_tokens: Int64Array,
    rows: Int32Array,
    tree_tokens: Int32Array,
    parents: Int32Array,
    offsets: Int32Array,
    nodes: int,
    tokens: Int64Array,
    mask: BoolArray,
) -> None:
    mask[:] = False
    for node in range(tokens.shape[0]):  # each below node 0
        tokens[node] = last_tokens[node // nodes] if node % nodes == 0 else 0
        mask[node * nodes] = mask[node * nodes + node % nodes] = True
    for t in range(rows.shape[0]):
        first, begin = rows[t] * nodes, offsets[t]
        for i in range(offsets[t + 1] - begin):
            node, above = first + i + 1, first + parents[begin + i] + 1
            tokens[node] = tree_tokens[begin + i]
            for j in range(i + 1):
                mask[node * nodes + j] = mask[above * nodes + j]
