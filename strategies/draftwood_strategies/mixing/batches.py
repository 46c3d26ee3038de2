"""What one compiled call does for all sequences of a step that a mixture drafts for."""

from __future__ import annotations

from typing import NamedTuple

from draftwood_strategies.mixing.candidates import Workspace
from draftwood_strategies.mixing.expansion import expand
from draftwood_strategies.mixing.learning import learn
from draftwood_strategies.mixing.sequence import UNKNOWN, SequenceArrays
from draftwood_strategies.mixing.sources.attribution import attribute
from draftwood_strategies.mixing.sources.source_trees import add_source
from draftwood_strategies.mixing.unused_nodes import fill
from draftwood_strategies.mixing.weights import Weights
from draftwood_strategies.native import Float32Array, Int32Array, Int64Array, Integer, compiled
from draftwood_strategies.structs import arrays_at
from draftwood_strategies.successors import ORDERS, WIDTH, TableArrays, update_table, wants_growth
from draftwood_strategies.tree_index import NO_NODE


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


class Verified(NamedTuple):
    """What a step wrote and verified, as in `BatchStrategy.observe_all`.

    Attributes:
        has_feedback: there is feedback; else the whole draft was verified, and the other arrays are empty.
        has_top_tokens: there are `top_tokens`, int32[m, k >= WIDTH].
    """

    accepted: Int32Array
    accepted_offsets: Int32Array
    has_feedback: bool
    has_top_tokens: bool
    tokens: Int32Array
    parents: Int32Array
    top_tokens: Int32Array
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
        workspace_address: of `Workspace`.
        table, model_table: int32[r, COLUMNS], the tenant's successor table and the model's; without rows, none.
        tokens, parents, scores, offsets: as in `DraftTrees`, with space for all budgets.
    """
    sources = SourceDrafts(source_tokens, source_parents, source_scores, source_offsets)
    workspace = arrays_at(Workspace, workspace_address)
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
    workspace: Workspace,
) -> int:
    """Merges the sources' trees for sequence s, and drafts; returns how many nodes."""
    trees, size = sequence.trees, 0
    trees.tree[0].first_child = NO_NODE
    for source in range(sources.offsets.shape[0]):
        first, last = sources.offsets[source, s], sources.offsets[source, s + 1]
        tokens, parents, scores = sources.tokens[first:last], sources.parents[first:last], sources.scores[first:last]
        size = add_source(trees, size, source, tokens, parents, scores, workspace.located)
    weights = arrays_at(Weights, sequence.state[0].weights)
    n = expand(trees, weights, workspace, table, model_table, sequence.tail, sequence.draft, budget)
    if table.shape[0] > 0 and n < budget:
        n = fill(sequence.top[: sequence.state[0].tops], sequence.draft, n, budget)
    sequence.state[0].drafted = n
    return n


@compiled
def learn_all(
    sequences: Int64Array,
    first: int,
    accepted: Int32Array,
    accepted_offsets: Int32Array,
    has_feedback: bool,
    has_top_tokens: bool,
    verified_tokens: Int32Array,
    verified_parents: Int32Array,
    top_tokens: Int32Array,
    verified_offsets: Int32Array,
    table_address: Integer,
    model_table: Int32Array,
    updates_table: bool,
    workspace_address: Integer,
) -> int:
    """Learns from the latest drafts, from the sequence `first` on, and moves the sequences on.

    Args:
        sequences: as in `draft_all`, with space for `top_tokens`.
        accepted to verified_offsets: as in `Verified`.
        table_address, workspace_address: of `TableArrays` and `Workspace`.
        model_table: int32[r, COLUMNS], the model's successor table, from which nothing is changed.
        updates_table: the table is that of the tenant, and learns here, too.

    Returns:
        The sequence to go on with after the table has grown; s after the last one.
    """
    table = arrays_at(TableArrays, table_address)
    workspace = arrays_at(Workspace, workspace_address)
    for s in range(first, sequences.shape[0]):
        sequence = arrays_at(SequenceArrays, sequences[s])
        written = accepted[accepted_offsets[s] : accepted_offsets[s + 1]]
        begin, end = verified_offsets[s], verified_offsets[s + 1]
        tokens, parents = verified_tokens[begin:end], verified_parents[begin:end]
        if sequence.state[0].drafted >= 0:
            _learn(sequence, has_feedback, tokens, parents, written, table.rows, model_table, workspace)
        tops = top_tokens[begin:end] if has_top_tokens else top_tokens[:0]
        _keep_top_tokens(sequence, tops)
        if updates_table and sequence.state[0].learns:
            update_table(table, sequence.tail, tokens[: tops.shape[0]], parents, tops)
        _move_on(sequence.tail, written)
        if updates_table and wants_growth(table):
            return s + 1
    return int(sequences.shape[0])


@compiled
def _learn(
    sequence: SequenceArrays,
    has_feedback: bool,
    tokens: Int32Array,
    parents: Int32Array,
    written: Int32Array,
    table: Int32Array,
    model_table: Int32Array,
    workspace: Workspace,
) -> None:
    """Counts nodes by source, and learns the weights, from the latest draft and the tree that was verified of it.

    Args:
        has_feedback: `tokens` and `parents` are that tree; else it was the whole draft.
    """
    attribute(
        sequence.draft,
        sequence.state[0].drafted,
        has_feedback,
        tokens,
        parents,
        written,
        workspace.located,
        sequence.counts,
    )
    learn(
        sequence.trees,
        arrays_at(Weights, sequence.state[0].weights),
        workspace,
        table,
        model_table,
        sequence.tail,
        written,
    )


@compiled
def _keep_top_tokens(sequence: SequenceArrays, top_tokens: Int32Array) -> None:
    """The latest draft is done with; its `top_tokens`, if there are any, fill unused nodes of the next one."""
    n = top_tokens.shape[0]
    sequence.state[0].drafted = UNKNOWN
    sequence.state[0].tops = n
    for node in range(n):
        for rank in range(WIDTH):
            sequence.top[node, rank] = top_tokens[node, rank]


@compiled
def _move_on(tail: Int32Array, written: Int32Array) -> None:
    """The sequence ends with these tokens now."""
    n = min(ORDERS, written.shape[0])
    for i in range(ORDERS - n):
        tail[i] = tail[i + n]
    for i in range(n):
        tail[ORDERS - n + i] = written[written.shape[0] - n + i]
