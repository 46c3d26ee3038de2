"""One draft of a mixture: what live sequences keep for it, and how a step's drafts are written in one compiled call."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import numpy as np

from draftwood_strategies.arrays import Float32Array, Int32Array, Int64Array, Integer, Real
from draftwood_strategies.mixing.candidates import (
    OUTSIDE,
    SOURCES,
    TABLE,
    Mixing,
    MixingWorkspace,
    SourceTrees,
    Weights,
    add_source,
    collect,
    to_probabilities,
)
from draftwood_strategies.native import arrays_at, compiled, record_dtype
from draftwood_strategies.successors import NOWHERE, ORDERS, WIDTH, read_context
from draftwood_strategies.tree_index import LINKED_NODE, NO_NODE, offer, takes

_BEST_CHANCE = 0.07
"""The probability that the first of these tokens comes next where nothing else is known; that of the i-th is 1/i of it.
Counted on 103 steps with empty drafts: one of the first 4, 8, 16 and 63 tokens came in 15, 22, 25 and 30% of
them, these constants give 15, 19, 24 and 33% (docs/decisions/hybrid.md)."""


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


STATE = record_dtype(weights=np.int64, learns=np.int64, drafted=np.int64, tops=np.int64)
"""The address of the `Weights` that it drafts with and updates, 1 if it updates the tenant's table as well, how
many nodes the latest draft has, `UNKNOWN` for none, and how many rows of `top_tokens` came of it."""
UNKNOWN = -1


class SequenceArrays(NamedTuple):
    """The arrays of a live sequence.

    Attributes:
        trees, draft: of its latest draft.
        top: int32[n, WIDTH], the latest `top_tokens`.
        tail: int32[ORDERS], its last tokens, the newest last; `NOWHERE` before its first one.
        counts: int64[2, SOURCES + 1], how many nodes of each source were verified and accepted.
        state: STATE[1].
    """

    trees: SourceTrees
    draft: MixedDraft
    top: Annotated[Int32Array, 2]
    tail: Int32Array
    counts: Annotated[Int64Array, 2]
    state: Annotated[Any, STATE]


def new_sequence(prompt: Int32Array, weights_address: int, learns: bool) -> SequenceArrays:
    """The arrays of a sequence that begins with `prompt`, without space for a draft."""
    tail: Int32Array = np.full(ORDERS, NOWHERE, np.int32)
    known = prompt[-ORDERS:]
    tail[ORDERS - known.shape[0] :] = known
    return SequenceArrays(
        trees=empty_trees(0),
        draft=empty_draft(0),
        top=np.empty((0, WIDTH), np.int32),
        tail=tail,
        counts=np.zeros((2, SOURCES + 1), np.int64),
        state=np.array([(weights_address, learns, UNKNOWN, 0)], STATE),
    )


def empty_trees(nodes: int) -> SourceTrees:
    """Space for merged trees of so many nodes."""
    return SourceTrees(np.empty(nodes + 1, LINKED_NODE), np.empty((nodes, SOURCES), np.float32))


def empty_draft(nodes: int) -> MixedDraft:
    """Space for a draft of so many nodes."""
    tokens, parents, sources = np.empty((3, nodes), np.int32)
    return MixedDraft(tokens, parents, np.empty(nodes, np.float32), sources)


class SourceDrafts(NamedTuple):
    """What the tree-shaped sources draft for all sequences of a step, in flat arrays.

    Attributes:
        tokens, parents, scores: int32[n], int32[n] and float32[n], as in `DraftTrees`.
        offsets: int32[k, s + 1]; the tree of source k for sequence i is from `offsets[k, i]` to `offsets[k, i + 1]`.
    """

    tokens: Int32Array
    parents: Int32Array
    scores: Float32Array
    offsets: Int32Array


@compiled
def draft_all(
    sequences: Int64Array,
    budgets: Int32Array,
    source_tokens: Int32Array,
    source_parents: Int32Array,
    source_scores: Float32Array,
    source_offsets: Int32Array,
    table: Int32Array,
    model_table: Int32Array,
    workspace_address: Integer,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    offsets: Int32Array,
) -> None:
    """Writes a draft for each sequence.

    Args:
        sequences: int64[s], the addresses of their `SequenceArrays`, which have space.
        budgets: int32[s], the most nodes of each draft.
        source_tokens to source_offsets: as in `SourceDrafts`.
        workspace_address: of `MixingWorkspace`.
        table, model_table: int32[r, COLUMNS], the tenant's successor table and the model's; without rows, none.
        tokens, parents, scores, offsets: as in `DraftTrees`, with space for all budgets.
    """
    sources = SourceDrafts(source_tokens, source_parents, source_scores, source_offsets)
    workspace = arrays_at(MixingWorkspace, workspace_address)
    end = 0
    for s in range(sequences.shape[0]):
        sequence = arrays_at(SequenceArrays, sequences[s])
        n, draft = _draft(sequence, s, budgets[s], sources, table, model_table, workspace), sequence.draft
        for node in range(n):
            tokens[end + node], parents[end + node] = draft.tokens[node], draft.parents[node]
            scores[end + node] = draft.scores[node]
        end += n
        offsets[s + 1] = end


@compiled
def _draft(
    sequence: SequenceArrays,
    s: int,
    budget: Integer,
    sources: SourceDrafts,
    table: Int32Array,
    model_table: Int32Array,
    workspace: MixingWorkspace,
) -> int:
    """Merges the sources' trees for sequence s, and drafts; returns how many nodes."""
    trees, size = sequence.trees, 0
    trees.tree[0].first_child = NO_NODE
    for source in range(sources.offsets.shape[0]):
        first, last = sources.offsets[source, s], sources.offsets[source, s + 1]
        tokens, parents, scores = sources.tokens[first:last], sources.parents[first:last], sources.scores[first:last]
        size = add_source(trees, size, source, tokens, parents, scores, workspace.located)
    weights = arrays_at(Weights, sequence.state[0].weights)
    n = expand(Mixing(trees, weights, workspace, table, model_table, sequence.tail), sequence.draft, budget)
    if table.shape[0] > 0 and n < budget:
        n = fill(sequence.top[: sequence.state[0].tops], sequence.draft, n, budget)
    sequence.state[0].drafted = n
    return n


@compiled
def expand(mixing: Mixing, draft: MixedDraft, budget: Integer) -> int:
    """Writes up to `budget` nodes of a draft, the most probable first, each expanded with the candidates of all
    sources; returns how many. So a node that a tree-shaped source has is continued from the successor table where the
    tree ends, and the other way round.
    """
    workspace = mixing.workspace
    items, frontier = workspace.items, workspace.frontier
    made, end = 0, 0
    parent = -1
    node: Integer = NO_NODE
    score: Real = 1.0
    for drafted in range(budget):
        wanted = budget - drafted
        if takes(frontier, drafted, end, wanted, score):
            read_context(mixing.tail, draft.tokens, draft.parents, parent, 0, workspace.context)
            n, _, _ = collect(mixing, node)
            to_probabilities(workspace.logits, n, workspace.probabilities)
            for i in range(1, n):
                new_score = score * workspace.probabilities[i]
                if made < items.shape[0] and takes(frontier, drafted, end, wanted, new_score):
                    item, tree_node = items[made], workspace.nodes[i]
                    item.token = workspace.tokens[i]
                    item.parent = parent
                    item.node = tree_node if tree_node >= 0 else OUTSIDE
                    item.source = _dominant_source(mixing.trees, workspace, i)
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
def _dominant_source(trees: SourceTrees, workspace: MixingWorkspace, i: int) -> int:
    """The source that has candidate i and raised it most above the escape."""
    best, highest, node = TABLE, -math.inf, workspace.nodes[i]
    for order in range(ORDERS):
        if workspace.ranks[i, order] < WIDTH:
            highest = workspace.contributions[i, TABLE] - workspace.contributions[0, TABLE]
    for source in range(SOURCES):
        raised = workspace.contributions[i, source] - workspace.contributions[0, source]
        if node >= 0 and trees.chances[node, source] > 0.0 and raised > highest:
            best, highest = source, raised
    return best


@compiled
def fill(top_tokens: Int32Array, draft: MixedDraft, size: int, budget: Integer) -> int:
    """Adds nodes at the root to a draft of `size` nodes, until it has `budget`: the best token after each node of the
    latest step, then the second best after each, and so on.

    While a tenant's successor table is nearly empty, most contexts have no row and a draft has fewer nodes than the
    budget. Text often repeats what the model held probable shortly before, so these tokens are drafted after the text,
    beside what the sources have. They are the table's part of the draft: verified nodes get rows, accepted or not, so
    that filling also makes the table grow faster, which is most of what it gains. LogitSpec and RACER draft from the
    last logits in the same situation.

    Args:
        top_tokens: int32[m, k], as in `Feedback`, of the latest step.

    Returns:
        The new size.
    """
    left: Real = 1.0
    for node in range(size):
        if draft.parents[node] == NO_NODE:
            left -= draft.scores[node]
    added = 0
    for rank in range(top_tokens.shape[1]):
        for node in range(top_tokens.shape[0]):
            token = top_tokens[node, rank]
            if _has_root(draft, size, token):
                continue
            if size == budget:
                return size
            added += 1
            draft.tokens[size] = token
            draft.parents[size] = NO_NODE
            draft.scores[size] = max(left, 0.0) * _BEST_CHANCE / added
            draft.sources[size] = TABLE
            size += 1
    return size


@compiled
def _has_root(draft: MixedDraft, size: int, token: Integer) -> bool:
    node = 0
    while node < size and (draft.parents[node] != NO_NODE or draft.tokens[node] != token):
        node += 1
    return node < size
