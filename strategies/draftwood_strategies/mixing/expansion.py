"""One draft of a mixture: the most probable nodes first, each expanded with the candidates of all sources.

So a node that a tree-shaped source has is continued from the successor table where the tree ends, and the other way
round. Knows token ids only; nothing of tenants and strategies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from draftwood_strategies.mixing.candidates import OUTSIDE, Workspace, collect, to_probabilities
from draftwood_strategies.mixing.sources.source_trees import SourceTrees
from draftwood_strategies.mixing.weights import SOURCES, TABLE, Weights
from draftwood_strategies.native import Float32Array, Int32Array, Integer, Real, compiled
from draftwood_strategies.successors import ORDERS, WIDTH, read_context
from draftwood_strategies.tree_index import NO_NODE, offer, takes


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
    trees: SourceTrees,
    weights: Weights,
    workspace: Workspace,
    rows: Int32Array,
    model_table: Int32Array,
    tail: Int32Array,
    draft: MixedDraft,
    budget: Integer,
) -> int:
    """Writes up to `budget` nodes of a draft, which has space for them; returns how many.

    Args:
        rows, model_table: int32[r, COLUMNS], as in `candidates.collect`.
        tail: int32[ORDERS], the last tokens of the sequence, the newest last.
    """
    items, frontier = workspace.items, workspace.frontier
    made, end = 0, 0
    parent = -1
    node: Integer = NO_NODE
    score: Real = 1.0
    for drafted in range(budget):
        wanted = budget - drafted
        if takes(frontier, drafted, end, wanted, score):
            read_context(tail, draft.tokens, draft.parents, parent, 0, workspace.context)
            n, _, _ = collect(trees, weights, workspace, rows, model_table, node)
            to_probabilities(workspace.logits, n, workspace.probabilities)
            for i in range(1, n):
                new_score = score * workspace.probabilities[i]
                if made < items.shape[0] and takes(frontier, drafted, end, wanted, new_score):
                    item, tree_node = items[made], workspace.nodes[i]
                    item.token = workspace.tokens[i]
                    item.parent = parent
                    item.node = tree_node if tree_node >= 0 else OUTSIDE
                    item.source = _dominant_source(trees, workspace, i)
                    item.score = new_score
                    end = offer(frontier, drafted, end, wanted, new_score, made)
                    made += 1
        if drafted == end:
            return drafted
        best = items[frontier[drafted].node]
        draft.tokens[drafted] = best.token
        draft.parents[drafted] = best.parent
        draft.sources[drafted] = best.source
        score = best.score
        draft.scores[drafted] = score
        parent, node = drafted, best.node
    return int(budget)


@compiled
def _dominant_source(trees: SourceTrees, workspace: Workspace, i: int) -> int:
    """The source that has candidate i and raised it most above the escape."""
    best, most, node = TABLE, -math.inf, workspace.nodes[i]
    for order in range(ORDERS):
        if workspace.ranks[i, order] < WIDTH:
            most = workspace.contributions[i, TABLE] - workspace.contributions[0, TABLE]
    for source in range(SOURCES):
        raised = workspace.contributions[i, source] - workspace.contributions[0, source]
        if node >= 0 and trees.chances[node, source] > 0.0 and raised > most:
            best, most = source, raised
    return best
