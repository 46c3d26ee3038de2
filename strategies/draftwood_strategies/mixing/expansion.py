"""One draft of a mixture: the most probable nodes first, each expanded with the candidates of all sources.

So a node that a tree-shaped source has is continued from the successor table where the tree ends, and the other way
round. Knows token ids only; nothing of tenants and strategies.
"""

from __future__ import annotations

from typing import NamedTuple

from draftwood_strategies.mixing.candidates import OUTSIDE, SOURCE_NODE, TOKEN, Workspace, collect, to_probabilities
from draftwood_strategies.mixing.sources.source_gain import dominant_source
from draftwood_strategies.mixing.sources.source_trees import SourceTrees
from draftwood_strategies.mixing.weights import Weights
from draftwood_strategies.native import Float32Array, Int32Array, Integer, Real, compiled
from draftwood_strategies.successors import read_context
from draftwood_strategies.tree_index import NO_NODE

_ITEM_TOKEN, _ITEM_PARENT, _ITEM_SOURCE_NODE, _ITEM_SOURCE = range(4)
"""Columns of an item: its token, its parent in the draft, its node in the sources' trees, its dominant source."""


class MixedDraft(NamedTuple):
    """A draft that `expand` writes.

    Attributes:
        tokens, parents, scores: int32[n], int32[n] and float32[n], as in `DraftTree`.
        sources: int32[n], the dominant source of each node.
    """

    tokens: Int32Array
    parents: Int32Array
    scores: Float32Array
    sources: Int32Array


@compiled
def expand(
    trees: SourceTrees, weights: Weights, workspace: Workspace, rows: Int32Array, tail: Int32Array, draft: MixedDraft
) -> int:
    """Writes the nodes of a draft, as many as there is space for; returns how many.

    Args:
        rows: int32[r, COLUMNS], the successor table.
        tail: int32[ORDERS], the last tokens of the sequence, the newest last.
    """
    items, frontier = workspace.items, workspace.frontier
    budget = int(draft.tokens.shape[0])
    made, end = 0, 0
    parent = -1
    node: Integer = NO_NODE
    score: Real = 1.0
    for drafted in range(budget):
        begin, wanted = drafted, budget - drafted
        if end - begin < wanted or score > workspace.item_scores[frontier[end - 1]]:
            read_context(tail, draft.tokens, draft.parents, parent, 0, workspace.context)
            n, _, _ = collect(trees, weights, workspace, rows, node)
            to_probabilities(workspace.contributions, n, workspace.probabilities)
            for i in range(1, n):
                made, end = _offer(
                    trees, workspace, i, parent, score * workspace.probabilities[i], wanted, made, begin, end
                )
        if begin == end:
            return drafted
        best = frontier[begin]
        draft.tokens[drafted] = items[best, _ITEM_TOKEN]
        draft.parents[drafted] = items[best, _ITEM_PARENT]
        draft.sources[drafted] = items[best, _ITEM_SOURCE]
        score = workspace.item_scores[best]
        draft.scores[drafted] = score
        parent, node = drafted, items[best, _ITEM_SOURCE_NODE]
    return budget


@compiled
def _offer(
    trees: SourceTrees,
    workspace: Workspace,
    i: int,
    parent: int,
    score: Real,
    wanted: int,
    made: int,
    begin: int,
    end: int,
) -> tuple[int, int]:
    """Puts candidate i into the frontier if it is among the `wanted` best; returns the new `made` and `end`."""
    items, scores, frontier = workspace.items, workspace.item_scores, workspace.frontier
    if end - begin == wanted:
        if score <= scores[frontier[end - 1]]:
            return made, end
        end -= 1
    if made == items.shape[0]:
        return made, end
    node = workspace.candidates[i, SOURCE_NODE]
    items[made, _ITEM_TOKEN] = workspace.candidates[i, TOKEN]
    items[made, _ITEM_PARENT] = parent
    items[made, _ITEM_SOURCE_NODE] = node if node >= 0 else OUTSIDE
    items[made, _ITEM_SOURCE] = dominant_source(trees, workspace, i)
    scores[made] = score
    at = end
    while at > begin and scores[frontier[at - 1]] < score:
        frontier[at] = frontier[at - 1]
        at -= 1
    frontier[at] = made
    return made + 1, end + 1
