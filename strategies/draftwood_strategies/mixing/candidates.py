"""The tokens that may follow one node of a draft, and the probability that the mixture of all sources gives to each.

Every candidate gets a logit, the sum of what the sources contribute, and the probabilities are their softmax; candidate
0 is "none of these". A tree-shaped source contributes the logarithm of its own conditional probability, scaled and
shifted by its confidence (for a token that it does not have, of the probability that it leaves over); the successor
table contributes a weight by rank, length of context and steadiness. This is the logistic mixing of PAQ compressors,
with weights that are chosen by a small context and learned online, for many symbols at once. As the weights are fitted
to what is accepted, the probabilities need no further calibration.

Knows nothing of drafts as a whole, nor of how weights are learned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from draftwood_strategies.mixing.sources.source_trees import SourceTrees
from draftwood_strategies.mixing.weights import SOURCES, TABLE, Weights, chance_bin, left_over, level_of
from draftwood_strategies.native import Float32Array, Float64Array, Int32Array, Integer, Real, compiled
from draftwood_strategies.successors import ORDERS, STEADY, STEADY_BINS, WIDTH, extended, find
from draftwood_strategies.tree_index import NO_NODE

TOKEN, SOURCE_NODE, RANKS = 0, 1, 2
"""Columns of a candidate: its token, its node in the merged trees of the sources (`NO_NODE` for none), and its rank in
the row of each order (`WIDTH` where the row does not have it)."""

NONE_OF_THESE = -1
"""The token of candidate 0."""

LOGIT = SOURCES + 1
"""The column of a candidate's logit, after the contributions of the sources."""

OUTSIDE = -2
"""The node of a path that no tree-shaped source has; its children come from the successor table alone."""

_MOST_CANDIDATES = 160
"""Bounds the workspace. Not tuned; it is only reached where 128 tokens of the trees follow one node."""
_MOST_OF_TREES = _MOST_CANDIDATES - ORDERS * WIDTH


class Workspace(NamedTuple):
    """Scratch arrays of a draft. Nothing in them outlives it.

    Attributes:
        candidates: int32[c, RANKS + ORDERS], the tokens that may follow a node.
        contributions: float64[c, LOGIT + 1], what each source adds to a candidate's logit, and the logit.
        probabilities: float64[c].
        context, found, steadiness: int32[ORDERS], a node's last tokens, the newest first, the rows of its contexts
            (-1 for unknown ones), and the steadiness of these.
        levels: int32[SOURCES], each source's confidence level.
        left: float64[SOURCES], the logarithm of what each source leaves over.
        items: int32[k, 4], nodes of the frontier and the draft, see `expansion`.
        item_scores: float64[k].
        frontier: int32[budget + 1], items that may be drafted next, from the number of drafted nodes on, the best
            first.
    """

    candidates: Int32Array
    contributions: Float64Array
    probabilities: Float64Array
    context: Int32Array
    found: Int32Array
    steadiness: Int32Array
    levels: Int32Array
    left: Float64Array
    items: Int32Array
    item_scores: Float64Array
    frontier: Int32Array


def workspace_for(budget: int) -> Workspace:
    """A workspace for trees of at most `budget` nodes."""
    return Workspace(
        candidates=np.empty((_MOST_CANDIDATES, RANKS + ORDERS), np.int32),
        contributions=np.empty((_MOST_CANDIDATES, LOGIT + 1), np.float64),
        probabilities=np.empty(_MOST_CANDIDATES, np.float64),
        context=np.empty(ORDERS, np.int32),
        found=np.empty(ORDERS, np.int32),
        steadiness=np.empty(ORDERS, np.int32),
        levels=np.empty(SOURCES, np.int32),
        left=np.empty(SOURCES, np.float64),
        items=np.empty((64 * budget + _MOST_CANDIDATES, 4), np.int32),
        item_scores=np.empty(64 * budget + _MOST_CANDIDATES, np.float64),
        frontier=np.empty(budget + 1, np.int32),
    )


@compiled
def collect(
    trees: SourceTrees, weights: Weights, workspace: Workspace, rows: Int32Array, node: Integer
) -> tuple[int, int, int]:
    """Fills the workspace with the candidates after a node, of the context that it holds, and their logits.

    Args:
        rows: int32[r, COLUMNS], the successor table; without rows, none.
        node: the node in the merged trees; `NO_NODE` for the root, `OUTSIDE` for a node that is not in them.

    Returns:
        How many candidates there are, the longest known context, and the node's confidence level.
    """
    candidates, contributions = workspace.candidates, workspace.contributions
    n = _tree_candidates(trees, workspace, node)
    level = _set_levels(trees.chances, candidates, workspace.levels, workspace.left, n)
    longest = _find_rows(workspace, rows)
    for i in range(n):
        _add_trees(trees, weights, workspace, i)
    contributions[0, LOGIT] += weights.escapes[level, longest]
    for back in range(longest):
        order = longest - 1 - back
        row = workspace.found[order]
        if row < 0:
            continue
        steady = workspace.steadiness[order]
        for rank in range(WIDTH):
            i = 1
            while i < n and candidates[i, TOKEN] != rows[row, rank]:
                i += 1
            if i == n:
                _clear(candidates, i, rows[row, rank], NO_NODE)
                _add_trees(trees, weights, workspace, i)
                n += 1
            weight = weights.ranks[level, longest, order, steady, rank]
            candidates[i, RANKS + order] = rank
            contributions[i, TABLE] += weight
            contributions[i, LOGIT] += weight
    return n, longest, level


@compiled
def _tree_candidates(trees: SourceTrees, workspace: Workspace, node: Integer) -> int:
    """Candidate 0, and the children of a node in the merged trees; returns how many that are."""
    _clear(workspace.candidates, 0, NONE_OF_THESE, NO_NODE)
    n = 1
    child = int(trees.tree.first_child[int(node) + 1]) if node != OUTSIDE else NO_NODE
    while child >= 0 and n < _MOST_OF_TREES:
        _clear(workspace.candidates, n, trees.tree.tokens[child], child)
        n += 1
        child = int(trees.tree.next_sibling[child])
    return n


@compiled
def _clear(candidates: Int32Array, i: int, token: Integer, node: Integer) -> None:
    candidates[i, TOKEN] = token
    candidates[i, SOURCE_NODE] = node
    for order in range(ORDERS):
        candidates[i, RANKS + order] = WIDTH


@compiled
def _set_levels(chances: Float32Array, candidates: Int32Array, levels: Int32Array, left: Float64Array, n: int) -> int:
    """Sets each source's confidence level and what it leaves over; returns the highest level."""
    level = 0
    for source in range(SOURCES):
        best: Real = 0.0
        rest: Real = 1.0
        for i in range(1, n):
            chance = chances[candidates[i, SOURCE_NODE], source]
            best = max(best, chance)
            rest -= chance
        levels[source] = level_of(best)
        left[source] = left_over(rest)
        level = max(level, levels[source])
    return level


@compiled
def _find_rows(workspace: Workspace, rows: Int32Array) -> int:
    """Looks up the rows of the workspace's context; returns the order of the longest known one, 0 for none."""
    context_hash: Integer = 0
    longest = 0
    for order in range(ORDERS):
        workspace.found[order] = -1
        workspace.steadiness[order] = -1
        if workspace.context[order] >= 0 and rows.shape[0] > 0:
            context_hash = extended(context_hash, workspace.context[order])
            row = find(rows, context_hash)
            if row >= 0:
                workspace.found[order] = row
                # A table of a plug-in may hold anything.
                workspace.steadiness[order] = min(max(rows[row, STEADY], 0), STEADY_BINS - 1)
                longest = order + 1
    return longest


@compiled
def _add_trees(trees: SourceTrees, weights: Weights, workspace: Workspace, i: int) -> None:
    """Sets what the tree-shaped sources contribute to candidate i; the table contributes nothing yet."""
    node = workspace.candidates[i, SOURCE_NODE]
    total = 0.0
    for source in range(SOURCES):
        level = workspace.levels[source]
        part = 0.0
        if level > 0:
            chance: Real = trees.chances[node, source] if node >= 0 else 0.0
            if chance > 0.0:
                part = weights.trust[source, level] * math.log(chance) + weights.bias[source, level, chance_bin(chance)]
            else:
                part = weights.trust[source, level] * workspace.left[source]
        workspace.contributions[i, source] = part
        total += part
    workspace.contributions[i, TABLE] = 0.0
    workspace.contributions[i, LOGIT] = total


@compiled
def to_probabilities(contributions: Float64Array, n: int, probabilities: Float64Array) -> None:
    """Sets the first n of `probabilities` to the softmax of the candidates' logits.

    Args:
        contributions: float64[c, LOGIT + 1], see `Workspace`.
    """
    top = -1e30
    for i in range(n):
        probabilities[i] = contributions[i, LOGIT]
        top = max(top, probabilities[i])
    total = 0.0
    for i in range(n):
        probabilities[i] = math.exp(probabilities[i] - top)
        total += probabilities[i]
    for i in range(n):
        probabilities[i] /= total
