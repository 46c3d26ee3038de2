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
    address_of,
    compiled,
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
        space = row[_NODES]
        active = int32s(row[_ACTIVE], SOURCES + 1)
        trees = SourceTrees(
            TreeIndex(
                int32s(row[_TREE], space), int32s(row[_FIRST_CHILD], space + 1), int32s(row[_NEXT_SIBLING], space)
            ),
            float32_rows(row[_CHANCES], space, SOURCES),
        )
        trees.tree.first_child[0] = NO_NODE
        size = 0
        for source in range(SOURCES + 1):
            active[source] = sources.take_part[source, s]
        for source in range(sources.begins.shape[0]):
            first, last = sources.begins[source, s], sources.begins[source, s + 1]
            size = add_source(
                trees,
                size,
                source,
                sources.tokens[first:last],
                sources.parents[first:last],
                sources.scores[first:last],
                located,
            )
        draft = MixedDraft(
            int32s(row[_TOKENS], budgets[s]),
            int32s(row[_PARENTS], budgets[s]),
            float32s(row[_SCORES], budgets[s]),
            int32s(row[_SOURCES], budgets[s]),
        )
        n = expand(trees, weights, workspace, table if active[TABLE] else table[:0], int32s(row[_TAIL], ORDERS), draft)
        if active[TABLE] and row[_TOPS] >= 0 and n < budgets[s]:
            n = fill(int32_rows(row[_TOP], row[_TOPS], WIDTH), draft, n, fill_workspace)
        row[_DRAFTED] = n
        for node in range(n):
            tokens[end + node] = draft.tokens[node]
            parents[end + node] = draft.parents[node]
            scores[end + node] = draft.scores[node]
        end += n
        begins[s + 1] = end


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
        space, drafted = row[_NODES], row[_DRAFTED]
        accepted = verified.accepted[verified.accepted_begins[s] : verified.accepted_begins[s + 1]]
        begin, end = verified.begins[s], verified.begins[s + 1]
        tail, active = int32s(row[_TAIL], ORDERS), int32s(row[_ACTIVE], SOURCES + 1)
        tokens, parents = verified.tokens[begin:end], verified.parents[begin:end]
        if drafted >= 0:
            draft = MixedDraft(
                int32s(row[_TOKENS], drafted),
                int32s(row[_PARENTS], drafted),
                float32s(row[_SCORES], drafted),
                int32s(row[_SOURCES], drafted),
            )
            counts = int64_rows(row[_COUNTS], 2, SOURCES + 1)
            if verified.known:
                attribute(draft, tokens, parents, accepted, located, counts)
            else:
                attribute_all(draft, accepted, counts)
            trees = SourceTrees(
                TreeIndex(
                    int32s(row[_TREE], space), int32s(row[_FIRST_CHILD], space + 1), int32s(row[_NEXT_SIBLING], space)
                ),
                float32_rows(row[_CHANCES], space, SOURCES),
            )
            known = table.rows if active[TABLE] else table.rows[:0]
            learn(trees, weights, workspace, known, tail, accepted, active)
        row[_DRAFTED] = row[_TOPS] = -1
        if verified.with_top:
            row[_TOPS] = end - begin
            top = int32_rows(row[_TOP], end - begin, WIDTH)
            for node in range(end - begin):
                for rank in range(WIDTH):
                    top[node, rank] = verified.top_tokens[begin + node, rank]
        if notes:
            last = end if verified.with_top else begin
            note(table, tail, verified.tokens[begin:last], parents, verified.top_tokens[begin:last])
        written = min(ORDERS, accepted.shape[0])
        for i in range(ORDERS - written):
            tail[i] = tail[i + written]
        for i in range(written):
            tail[ORDERS - written + i] = accepted[accepted.shape[0] - written + i]
        if notes and wants_growth(table):
            return s + 1
    return int(rows.shape[0])
