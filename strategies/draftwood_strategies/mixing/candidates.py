"""The tokens that may follow one node of a draft, and the probability that the mixture of all sources gives to each.

Every candidate gets a logit, the sum of what the sources contribute, and the probabilities are their softmax. Candidate
0 is the escape: none of them comes next. A tree-shaped source contributes the logarithm of its own conditional
probability, scaled and shifted by its confidence; for a token that it does not have, of the probability that it leaves
over. The successor table contributes a weight by rank, length of context and steadiness. This is the logistic mixing
of PAQ compressors, with weights that are chosen by a small context and learned online, for many symbols at once. As the
weights are fitted to what is accepted, the probabilities need no further calibration.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import numpy as np

from draftwood_strategies.arrays import Float32Array, Float64Array, Int32Array, Integer, Real
from draftwood_strategies.native import compiled, record_dtype
from draftwood_strategies.successors import ORDERS, STEADY, STEADY_BINS, WIDTH, extended, find
from draftwood_strategies.tree_index import FRONTIER_ENTRY, NO_NODE, Frontier, TreeIndex, insert

SOURCES = 4
"""How many tree-shaped sources can be mixed."""

TABLE = SOURCES
"""The number of the successor table among the sources."""

LEVELS, CHANCE_BINS = 4, 8
LEAST_CHANCE = 1e-4
"""Bounds the logarithm of a source's probability."""
_LEAST_LEFT = 0.02
"""Bounds the logarithm of what a source leaves to other tokens."""

# The prior: fitted on GSM8K and support prompts, the 20 measured ones among them, and rounded to 0.05.
# `tools/fit_source_weights.py` prints these constants for other prompts; those for HumanEval, MT-Bench and the demo's
# warm-up questions made acceptance lengths 1 to 4% shorter (docs/decisions/hybrid.md).
_BEST_ROW = (1.8, 1.15, 0.65, 0.35, 0.05, -0.15, -0.35, -0.5)
_OTHER_ROWS = (0.95, 0.5, 0.3, 0.15, 0.0, -0.05, -0.15, -0.2)
_FIRST_OF_OTHER_ROWS = (0.95, 0.95, 0.8, 0.6)
_BEST_PER_STEADY_BIN, _OTHER_PER_STEADY_BIN = (0.3, 0.2, 0.15, 0.05), (0.15, 0.1, 0.05, 0.05)
_ESCAPES = ((0.5, 1.9, 1.7, 1.0, 1.0), (0.7, 1.2, 1.1, 0.65, 0.7), (0.5, 0.5, 0.65, 0.7, 1.0), (0.5,) * 5)
_TRUST, _BIAS = (0.0, 0.4, 0.7, 1.25), (0.0, 1.0, 1.1, 0.3)


class Weights(NamedTuple):
    """What was learned of the sources from a tenant's traffic.

    A source's confidence level at a node is a bin of the probability of its best token there, 0 where it has none; the
    level of the node is the highest of its tree-shaped sources.

    Attributes:
        ranks: float32[LEVELS, ORDERS + 1, ORDERS, STEADY_BINS, WIDTH], by the node's level, longest known context,
            context, steadiness of its row, rank.
        escapes: float32[LEVELS, ORDERS + 1], the logit of the escape by the node's level and longest known
            context.
        trust: float32[SOURCES, LEVELS], factors of the logarithm of a source's probability, by its own level.
        bias: float32[SOURCES, LEVELS, CHANCE_BINS], what is added to it, by its own level and that probability.
        seen: float32[LEVELS, ORDERS + 1], tokens learned from, by the node's level and longest known context.
    """

    ranks: Annotated[Float32Array, 5]
    escapes: Annotated[Float32Array, 2]
    trust: Annotated[Float32Array, 2]
    bias: Annotated[Float32Array, 3]
    seen: Annotated[Float32Array, 2]


def prior_weights() -> Weights:
    """Weights before any traffic."""
    ranks = np.zeros((LEVELS, ORDERS + 1, ORDERS, STEADY_BINS, WIDTH), np.float32)
    steady = np.arange(STEADY_BINS)
    for longest in range(1, ORDERS + 1):
        ranks[:, longest, : longest - 1] = _OTHER_ROWS
        ranks[:, longest, longest - 1] = _BEST_ROW
        for level in range(LEVELS):
            ranks[level, longest, : longest - 1, :, 0] = (
                _FIRST_OF_OTHER_ROWS[level] + _OTHER_PER_STEADY_BIN[level] * steady
            )
            ranks[level, longest, longest - 1, :, 0] += _BEST_PER_STEADY_BIN[level] * steady
    return Weights(
        ranks=ranks,
        escapes=np.array(_ESCAPES, np.float32),
        trust=np.tile(np.array(_TRUST, np.float32), (SOURCES, 1)),
        bias=np.tile(np.array(_BIAS, np.float32)[:, None], (SOURCES, 1, CHANCE_BINS)),
        seen=np.zeros((LEVELS, ORDERS + 1), np.float32),
    )


@compiled
def level_of(best: Real) -> int:
    """The confidence level of a source with this probability for its best token; 0 for one without a token."""
    return 0 if best <= 0.0 else 1 if best < 0.3 else 2 if best < 0.8 else 3


@compiled
def chance_bin(chance: Real) -> int:
    """The bin of a probability; bins are of even width in the logit."""
    return min(CHANCE_BINS - 1, max(0, int(math.log(chance / (1.0 + 1e-6 - chance)) + 4.0)))


@compiled
def left_over(left: Real) -> Real:
    """The logarithm of the probability that a source leaves to tokens which it does not have."""
    return math.log(max(left, _LEAST_LEFT))


class SourceTrees(NamedTuple):
    """The merged trees of the sources.

    Attributes:
        tree: the tokens of the m nodes and their links.
        chances: float32[m, SOURCES], the probability that each source gives to a node once its parent is accepted; 0
            where the source does not have the node.
    """

    tree: TreeIndex
    chances: Annotated[Float32Array, 2]


@compiled
def add_source(
    trees: SourceTrees,
    size: int,
    source: int,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    located: Int32Array,
) -> int:
    """Adds a source's draft tree to the merged ones, which have `size` nodes; returns the new size.

    Args:
        tokens, parents, scores: [n], a `DraftTree`; the merged trees have space for all its nodes.
        located: int32[n or more], workspace.
    """
    end = insert(trees.tree, size, tokens, parents, located)
    for node in range(size, end):
        for other in range(SOURCES):
            trees.chances[node, other] = 0.0
    for i in range(tokens.shape[0]):
        score_above: Real = scores[parents[i]] if parents[i] >= 0 else 1.0
        chance = scores[i] / score_above if score_above > 0.0 else 0.0
        trees.chances[located[i], source] = min(1.0, max(LEAST_CHANCE, chance))
    return end


ESCAPE = -1
"""The token of candidate 0."""

OUTSIDE = -2
"""The node of a path that no tree-shaped source has; its children come from the successor table alone."""

_MOST_CANDIDATES = 160
"""Bounds the workspace; it is only reached where 128 tokens of the trees follow one node."""
_MOST_OF_TREES = _MOST_CANDIDATES - ORDERS * WIDTH


ITEM = record_dtype(token=np.int32, parent=np.int32, node=np.int32, source=np.int32, score=np.float64)
"""A node of the frontier or the draft: its token, its parent in the draft, its node in the sources' trees, its dominant
source and its score."""


class MixingWorkspace(NamedTuple):
    """Scratch arrays of a draft. Nothing in them outlives it.

    Attributes:
        tokens: int32[c], the tokens that may follow a node: the candidates.
        nodes: int32[c], each one's node in the merged trees of the sources; `NO_NODE` for none.
        ranks: int32[c, ORDERS], its rank in the row of each order; `WIDTH` where the row does not have it.
        contributions: float64[c, SOURCES + 1], what each source, the table last, adds to its logit.
        logits, probabilities: float64[c].
        context, steadiness: int32[ORDERS], a node's last tokens, the newest first, and the steadiness of the rows of
            its contexts, -1 for unknown ones.
        successors: int32[ORDERS, WIDTH], those of the known rows.
        levels: int32[SOURCES], each source's confidence level.
        left: float64[SOURCES], the logarithm of what each source leaves over.
        items: ITEM[k].
        frontier: FRONTIER_ENTRY[budget + 1], items that may be drafted next, from the number of drafted nodes on.
        located: int32[n], where the nodes of a source's tree, or of the draft, are in another one.
    """

    tokens: Int32Array
    nodes: Int32Array
    ranks: Annotated[Int32Array, 2]
    contributions: Annotated[Float64Array, 2]
    logits: Float64Array
    probabilities: Float64Array
    context: Int32Array
    steadiness: Int32Array
    successors: Annotated[Int32Array, 2]
    levels: Int32Array
    left: Float64Array
    items: Annotated[Any, ITEM]
    frontier: Frontier
    located: Int32Array


def mixing_workspace(budget: int, largest: int) -> MixingWorkspace:
    """A workspace for drafts of at most `budget` nodes, and trees of at most `largest` to be merged."""
    return MixingWorkspace(
        tokens=np.empty(_MOST_CANDIDATES, np.int32),
        nodes=np.empty(_MOST_CANDIDATES, np.int32),
        ranks=np.empty((_MOST_CANDIDATES, ORDERS), np.int32),
        contributions=np.empty((_MOST_CANDIDATES, SOURCES + 1), np.float64),
        logits=np.empty(_MOST_CANDIDATES, np.float64),
        probabilities=np.empty(_MOST_CANDIDATES, np.float64),
        context=np.empty(ORDERS, np.int32),
        steadiness=np.empty(ORDERS, np.int32),
        successors=np.empty((ORDERS, WIDTH), np.int32),
        levels=np.empty(SOURCES, np.int32),
        left=np.empty(SOURCES, np.float64),
        items=np.empty(64 * budget + _MOST_CANDIDATES, ITEM),
        frontier=np.empty(budget + 1, FRONTIER_ENTRY),
        located=np.empty(max(budget, largest), np.int32),
    )


class Mixing(NamedTuple):
    """What the next tokens of a sequence are mixed from.

    Attributes:
        trees: those of its sources, merged.
        weights: the weights that it drafts with.
        workspace: this thread's.
        table, model_table: int32[r, COLUMNS], the tenant's successor table, and the model's for contexts that are not
            in it; without rows, none.
        tail: int32[ORDERS], the last tokens of the sequence, the newest last; `NOWHERE` before its first one.
    """

    trees: SourceTrees
    weights: Weights
    workspace: MixingWorkspace
    table: Int32Array
    model_table: Int32Array
    tail: Int32Array


@compiled
def collect(mixing: Mixing, node: Integer) -> tuple[int, int, int]:
    """Fills the workspace with the candidates after a node, of the context that it holds, and their logits.

    Args:
        node: the node in the merged trees; `NO_NODE` for the root, `OUTSIDE` for a node that is not in them.

    Returns:
        How many candidates there are, the longest known context, and the node's confidence level.
    """
    trees, weights, workspace = mixing.trees, mixing.weights, mixing.workspace
    n = _tree_candidates(trees, workspace, node)
    level = _set_levels(trees.chances, workspace, n)
    longest = _find_rows(workspace, mixing.table, mixing.model_table)
    for i in range(n):
        _add_trees(trees, weights, workspace, i)
    workspace.logits[0] += weights.escapes[level, longest]
    for back in range(longest):
        order = longest - 1 - back
        steady = workspace.steadiness[order]
        if steady < 0:
            continue
        for rank in range(WIDTH):
            token = workspace.successors[order, rank]
            i = 1
            while i < n and workspace.tokens[i] != token:
                i += 1
            if i == n:
                _clear(workspace, i, token, NO_NODE)
                _add_trees(trees, weights, workspace, i)
                n += 1
            weight = weights.ranks[level, longest, order, steady, rank]
            workspace.ranks[i, order] = rank
            workspace.contributions[i, TABLE] += weight
            workspace.logits[i] += weight
    return n, longest, level


@compiled
def _tree_candidates(trees: SourceTrees, workspace: MixingWorkspace, node: Integer) -> int:
    """Candidate 0, and the children of a node in the merged trees; returns how many that are."""
    _clear(workspace, 0, ESCAPE, NO_NODE)
    n = 1
    child = int(trees.tree[int(node) + 1].first_child) if node != OUTSIDE else NO_NODE
    while child >= 0 and n < _MOST_OF_TREES:
        _clear(workspace, n, trees.tree[child + 1].token, child)
        n += 1
        child = int(trees.tree[child + 1].next_sibling)
    return n


@compiled
def _clear(workspace: MixingWorkspace, i: int, token: Integer, node: Integer) -> None:
    workspace.tokens[i] = token
    workspace.nodes[i] = node
    for order in range(ORDERS):
        workspace.ranks[i, order] = WIDTH


@compiled
def _set_levels(chances: Float32Array, workspace: MixingWorkspace, n: int) -> int:
    """Sets each source's confidence level and what it leaves over; returns the highest level."""
    level = 0
    for source in range(SOURCES):
        best: Real = 0.0
        rest: Real = 1.0
        for i in range(1, n):
            chance = chances[workspace.nodes[i], source]
            best = max(best, chance)
            rest -= chance
        workspace.levels[source] = level_of(best)
        workspace.left[source] = left_over(rest)
        level = max(level, workspace.levels[source])
    return level


@compiled
def _find_rows(workspace: MixingWorkspace, rows: Int32Array, model_table: Int32Array) -> int:
    """Looks up the rows of the workspace's context; returns the order of the longest known one, 0 for none."""
    context_hash: Integer = 0
    longest = 0
    for order in range(ORDERS):
        workspace.steadiness[order] = -1
        if workspace.context[order] < 0:
            continue
        context_hash = extended(context_hash, workspace.context[order])
        if _read_row(workspace, rows, context_hash, order) or _read_row(workspace, model_table, context_hash, order):
            longest = order + 1
    return longest


@compiled
def _read_row(workspace: MixingWorkspace, rows: Int32Array, context_hash: Integer, order: int) -> bool:
    """Copies the row of a context into the workspace, if the table has one."""
    row = find(rows, context_hash) if rows.shape[0] > 0 else -1
    if row < 0:
        return False
    # A table of a plug-in may hold anything.
    workspace.steadiness[order] = min(max(rows[row, STEADY], 0), STEADY_BINS - 1)
    for rank in range(WIDTH):
        workspace.successors[order, rank] = rows[row, rank]
    return True


@compiled
def _add_trees(trees: SourceTrees, weights: Weights, workspace: MixingWorkspace, i: int) -> None:
    """Sets what the tree-shaped sources contribute to candidate i; the table contributes nothing yet."""
    node = workspace.nodes[i]
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
    workspace.logits[i] = total


@compiled
def to_probabilities(logits: Float64Array, n: int, probabilities: Float64Array) -> None:
    """Sets the first n of `probabilities` to the softmax of the logits."""
    top = -1e30
    for i in range(n):
        top = max(top, logits[i])
    total = 0.0
    for i in range(n):
        probabilities[i] = math.exp(logits[i] - top)
        total += probabilities[i]
    for i in range(n):
        probabilities[i] /= total
