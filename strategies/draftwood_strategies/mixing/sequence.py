"""The live sequences of a mixture, and what one compiled call does for all of a step.

The arrays of a sequence keep their addresses until a larger draft is asked for; a call takes one row of addresses for
each. Knows token ids only; nothing of tenants and strategies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draftwood_strategies.mixing.candidates import Workspace
from draftwood_strategies.mixing.expansion import MixedDraft, expand
from draftwood_strategies.mixing.learning import learn
from draftwood_strategies.mixing.sources.attribution import attribute, attribute_all
from draftwood_strategies.mixing.sources.source_trees import SourceTrees, add_source
from draftwood_strategies.mixing.unused_nodes import FillWorkspace, fill
from draftwood_strategies.mixing.weights import SOURCES, TABLE, Weights
from draftwood_strategies.native import (
    Float32Array,
    Int32Array,
    Int64Array,
    Integer,
    address_of,
    compiled,
    copy_draft,
    flattened,
    float32_rows,
    float32s,
    int32_rows,
    int32s,
    int64_rows,
    int64s,
)
from draftwood_strategies.successors import NOWHERE, ORDERS, WIDTH, TableArrays, note, wants_growth
from draftwood_strategies.tree_index import NO_NODE, TreeIndex

(
    _TREE,
    _FIRST_CHILD,
    _NEXT_SIBLING,
    _CHANCES,
    _TOKENS,
    _PARENTS,
    _SOURCES,
    _SCORES,
    _TOP,
    _TAIL,
    _ACTIVE,
    _COUNTS,
    _NODES,
    _DRAFTED,
    _TOPS,
    _ROW,
) = range(16)
"""Entries of a row, int64[_ROW]: the addresses of a sequence's arrays; then how many nodes its merged trees have space
for, how many its latest draft has, and how many rows its latest `top_tokens`; -1 for none of these."""


class MixedSequence:
    """One live sequence: its end, the sources' trees of its latest draft, and that draft.

    Attributes:
        counts: int64[2, SOURCES + 1], how many nodes of each source, the table last, were verified and accepted.
        tail: int32[ORDERS], its last tokens, the newest last; `NOWHERE` before its first one.
        nodes, merged, tops: how many nodes of a draft, nodes of the sources' trees and rows of `top_tokens` there is
            space for.
    """

    def __init__(self, prompt: Int32Array) -> None:
        self.counts: Int64Array = np.zeros((2, SOURCES + 1), np.int64)
        tail = prompt[-ORDERS:]
        self.tail: Int32Array = np.full(ORDERS, NOWHERE, np.int32)
        self.tail[ORDERS - tail.shape[0] :] = tail
        self._active = np.zeros(SOURCES + 1, np.int32)
        self._row = np.zeros(_ROW, np.int64)
        self._row[_DRAFTED] = self._row[_TOPS] = -1
        self._row[_TAIL], self._row[_ACTIVE] = address_of(self.tail), address_of(self._active)
        self._row[_COUNTS] = address_of(self.counts)
        self.nodes = self.merged = self.tops = 0
        self.address = address_of(self._row)
        """Of its row."""

    def reserve(self, nodes: int, merged: int) -> None:
        """Makes space for a draft, and for the sources' trees; the latest ones are lost."""
        if nodes > self.nodes:
            self.nodes = nodes
            self._draft = np.empty((4, nodes), np.int32)
            self._row[_TOKENS : _SCORES + 1] = [*map(address_of, self._draft)]
        if merged > self.merged or not self.merged:
            self.merged = merged
            self._trees = np.empty(merged, np.int32), np.empty(merged + 1, np.int32), np.empty(merged, np.int32)
            self._chances = np.empty((merged, SOURCES), np.float32)
            self._row[_TREE : _CHANCES + 1] = [*map(address_of, (*self._trees, self._chances))]
            self._row[_NODES] = merged

    def reserve_tops(self, rows: int) -> None:
        """Makes space for the latest `top_tokens`, which are lost."""
        self.tops = rows
        self._top = np.empty((rows, WIDTH), np.int32)
        self._row[_TOP], self._row[_TOPS] = address_of(self._top), -1


class SourceDrafts(NamedTuple):
    """What the tree-shaped sources draft for all sequences of a step, in flat arrays.

    Attributes:
        tokens, parents, scores: int32[n], int32[n] and float32[n], as in `DraftTrees`.
        begins: int32[k, s + 1]; the tree of source k for sequence i is from `begins[k, i]` to `begins[k, i + 1]`.
        take_part: int32[SOURCES + 1, s], 1 where a source, the table last, takes part in a draft.
    """

    tokens: Int32Array
    parents: Int32Array
    scores: Float32Array
    begins: Int32Array
    take_part: Int32Array


class Verified(NamedTuple):
    """What a step wrote and verified, as in `BatchStrategy.observe_all`.

    Attributes:
        known: there is feedback; else the whole draft was verified, and the other arrays are empty.
        with_top: there are `top_tokens`, int32[m, k >= WIDTH].
    """

    accepted: Int32Array
    accepted_begins: Int32Array
    known: bool
    with_top: bool
    tokens: Int32Array
    parents: Int32Array
    top_tokens: Int32Array
    begins: Int32Array


@flattened
@compiled
def draft_all(
    rows: Int64Array,
    budgets: Int32Array,
    sources: SourceDrafts,
    weights: Weights,
    table: Int32Array,
    workspace: Workspace,
    fill_workspace: FillWorkspace,
    located: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    begins: Int32Array,
) -> None:
    """Writes a draft for each sequence.

    Args:
        rows: int64[s], the addresses of the sequences' rows, which have space.
        budgets: int32[s], the most nodes of each draft.
        table: int32[r, COLUMNS], the successor table; without rows, none.
        located: int32[k], workspace, for the largest tree of a source.
        tokens, parents, scores, begins: as in `DraftTrees`, with space for all budgets.
    """
    end = 0
    for s in range(rows.shape[0]):
        row = int64s(rows[s], _ROW)
        n = _draft(row, s, budgets[s], sources, weights, table, workspace, fill_workspace, located)
        row[_DRAFTED] = n
        copy_draft(row[_TOKENS], row[_PARENTS], row[_SCORES], n, tokens, parents, scores, end)
        end += n
        begins[s + 1] = end


@compiled
def _draft(
    row: Int64Array,
    s: int,
    budget: Integer,
    sources: SourceDrafts,
    weights: Weights,
    table: Int32Array,
    workspace: Workspace,
    fill_workspace: FillWorkspace,
    located: Int32Array,
) -> int:
    """Merges the sources' trees for sequence s, and drafts; returns how many nodes."""
    space, active = row[_NODES], int32s(row[_ACTIVE], SOURCES + 1)
    index = TreeIndex(
        int32s(row[_TREE], space), int32s(row[_FIRST_CHILD], space + 1), int32s(row[_NEXT_SIBLING], space)
    )
    trees = SourceTrees(index, float32_rows(row[_CHANCES], space, SOURCES))
    index.first_child[0] = NO_NODE
    for source in range(SOURCES + 1):
        active[source] = sources.take_part[source, s]
    size = 0
    for source in range(sources.begins.shape[0]):
        first, last = sources.begins[source, s], sources.begins[source, s + 1]
        tokens, parents, scores = sources.tokens[first:last], sources.parents[first:last], sources.scores[first:last]
        size = add_source(trees, size, source, tokens, parents, scores, located)
    draft = MixedDraft(
        int32s(row[_TOKENS], budget),
        int32s(row[_PARENTS], budget),
        float32s(row[_SCORES], budget),
        int32s(row[_SOURCES], budget),
    )
    n = expand(trees, weights, workspace, table if active[TABLE] else table[:0], int32s(row[_TAIL], ORDERS), draft)
    if active[TABLE] and row[_TOPS] >= 0 and n < budget:
        n = fill(int32_rows(row[_TOP], row[_TOPS], WIDTH), draft, n, fill_workspace)
    return n


@flattened
@compiled
def learn_all(
    rows: Int64Array,
    first: int,
    verified: Verified,
    weights: Weights,
    table: TableArrays,
    notes: bool,
    workspace: Workspace,
    located: Int32Array,
) -> int:
    """Learns from the latest drafts, from the sequence `first` on, and moves the sequences on.

    Args:
        rows: as in `draft_all`, with space for `top_tokens`.
        notes: the table learns here, too.
        located: int32[m], workspace, for the largest verified tree.

    Returns:
        The sequence to go on with after the table has grown; s after the last one.
    """
    for s in range(first, rows.shape[0]):
        row = int64s(rows[s], _ROW)
        accepted = verified.accepted[verified.accepted_begins[s] : verified.accepted_begins[s + 1]]
        begin, end = verified.begins[s], verified.begins[s + 1]
        tokens, parents = verified.tokens[begin:end], verified.parents[begin:end]
        tail = int32s(row[_TAIL], ORDERS)
        if row[_DRAFTED] >= 0:
            _learn(row, verified.known, tokens, parents, accepted, tail, weights, table.rows, workspace, located)
        top_tokens = verified.top_tokens[begin:end] if verified.with_top else verified.top_tokens[:0]
        _keep_top(row, verified.with_top, top_tokens)
        if notes:
            note(table, tail, tokens[: top_tokens.shape[0]], parents, top_tokens)
        _move_on(tail, accepted)
        if notes and wants_growth(table):
            return s + 1
    return int(rows.shape[0])


@compiled
def _learn(
    row: Int64Array,
    known: bool,
    tokens: Int32Array,
    parents: Int32Array,
    accepted: Int32Array,
    tail: Int32Array,
    weights: Weights,
    table: Int32Array,
    workspace: Workspace,
    located: Int32Array,
) -> None:
    """Counts nodes by source, and learns the weights, from the latest draft and the tree that was verified of it.

    Args:
        known: `tokens` and `parents` are that tree; else it was the whole draft.
    """
    space, drafted, active = row[_NODES], row[_DRAFTED], int32s(row[_ACTIVE], SOURCES + 1)
    draft = MixedDraft(
        int32s(row[_TOKENS], drafted),
        int32s(row[_PARENTS], drafted),
        float32s(row[_SCORES], drafted),
        int32s(row[_SOURCES], drafted),
    )
    counts = int64_rows(row[_COUNTS], 2, SOURCES + 1)
    if known:
        attribute(draft, tokens, parents, accepted, located, counts)
    else:
        attribute_all(draft, accepted, counts)
    index = TreeIndex(
        int32s(row[_TREE], space), int32s(row[_FIRST_CHILD], space + 1), int32s(row[_NEXT_SIBLING], space)
    )
    trees = SourceTrees(index, float32_rows(row[_CHANCES], space, SOURCES))
    learn(trees, weights, workspace, table if active[TABLE] else table[:0], tail, accepted, active)


@compiled
def _keep_top(row: Int64Array, known: bool, top_tokens: Int32Array) -> None:
    """The latest draft is done with; its `top_tokens`, if they are known, fill unused nodes of the next one."""
    n = top_tokens.shape[0]
    row[_DRAFTED], row[_TOPS] = -1, n if known else -1
    kept = int32_rows(row[_TOP], n, WIDTH)
    for node in range(n):
        for rank in range(WIDTH):
            kept[node, rank] = top_tokens[node, rank]


@compiled
def _move_on(tail: Int32Array, accepted: Int32Array) -> None:
    """The sequence ends with the accepted tokens now."""
    written = min(ORDERS, accepted.shape[0])
    for i in range(ORDERS - written):
        tail[i] = tail[i + written]
    for i in range(written):
        tail[ORDERS - written + i] = accepted[accepted.shape[0] - written + i]
