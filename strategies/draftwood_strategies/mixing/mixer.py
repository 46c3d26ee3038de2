"""Several sources as one draft: trees of the tree-shaped ones and the successor table, mixed at every node.

Knows token ids only; nothing of tenants and strategies.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf

import numpy as np

from draftwood_strategies.base import Feedback, StepFeedback
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, DraftTrees, tree_arrays
from draftwood_strategies.mixing.batches import SourceDrafts, Verified, draft_all, learn_all
from draftwood_strategies.mixing.candidates import Workspace, workspace_for
from draftwood_strategies.mixing.sequence import empty_draft, empty_trees, new_sequence
from draftwood_strategies.mixing.weights import Weights, prior_weights
from draftwood_strategies.native import Int32Array, Int64Array, segment_sizes
from draftwood_strategies.structs import Struct, addresses_of
from draftwood_strategies.successors import COLUMNS, WIDTH, SuccessorTable, table_arrays
from draftwood_strategies.threads.row_threads import draft_in_threads

NO_ROWS = np.empty((0, COLUMNS), np.int32)
_NO_NODES = np.empty(0, np.int32)
_NO_TOP_TOKENS = np.empty((0, WIDTH), np.int32)
_LEAST = 64
"""Nodes that a workspace has space for."""
_LEAST_NODES, _LEAST_TOPS = 16, 17
"""Of a draft, and of a verified tree, that a sequence has space for once it has any."""
_thread = threading.local()


def _workspace(nodes: int, largest: int) -> Struct[Workspace]:
    """This thread's workspace, for drafts of up to `nodes` nodes, and trees of up to `largest` to be merged or learned
    from."""
    had: tuple[int, int] = getattr(_thread, "sizes", (0, 0))
    if nodes > had[0] or largest > had[1] or not had[0]:
        _thread.sizes = max(nodes, had[0], _LEAST), max(largest, had[1], _LEAST)
        _thread.workspace = Struct(workspace_for(*_thread.sizes))
    workspace: Struct[Workspace] = _thread.workspace
    return workspace


class Mixer:
    """What a tenant's sequences share: the weights of the sources, and the successor table if it is one of them.

    Attributes:
        learned: the weights, where compiled code finds them.
        table: None if it is none of the sources.
        model_table: int32[r, COLUMNS], rows for contexts that are not in `table`: the same for all tenants, never
            written; without rows, none.
    """

    def __init__(self, table: SuccessorTable | None) -> None:
        self.table = table
        self.model_table = NO_ROWS
        self._no_table = Struct(table_arrays(NO_ROWS, 0))
        self.learned = Struct(prior_weights())

    @property
    def weights(self) -> Weights:
        """Of the sources."""
        return self.learned.fields

    @property
    def nbytes(self) -> int:
        """Bytes of table and weights; arrays of live sequences and workspaces are not counted."""
        return sum(weights.nbytes for weights in self.weights) + (0 if self.table is None else self.table.nbytes)

    def draft_all(
        self,
        sequences: SequenceOf[SequenceMixer],
        trees: SequenceOf[DraftTrees],
        budgets: Int32Array,
    ) -> DraftTrees:
        """A tree for each sequence.

        Args:
            trees: the checked trees of each tree-shaped source, in the order of their numbers, at most `SOURCES`; one
                for each sequence, which is empty where the source does not take part.
            budgets: int32[s], the most nodes of each draft.
        """
        sources = _source_drafts(trees, len(sequences))
        sizes = sources.offsets[:, 1:] - sources.offsets[:, :-1]
        nodes, merged = int(budgets.max()), int(sizes.sum(axis=0).max()) if trees else 0
        for one in sequences:
            one.reserve(nodes, merged)
        largest = int(sizes.max()) if trees else 0
        addresses = addresses_of([one.struct for one in sequences])
        table = NO_ROWS if self.table is None else self.table.rows

        def draft(rows: range) -> DraftTrees:
            own = budgets[rows.start : rows.stop]
            arrays = tree_arrays(len(rows), int(own.sum()))
            draft_all(
                addresses[rows.start : rows.stop],
                own,
                sources.tokens,
                sources.parents,
                sources.scores,
                np.ascontiguousarray(sources.offsets[:, rows.start : rows.stop + 1]),
                table,
                self.model_table,
                _workspace(nodes, largest).address,
                *arrays,
            )
            return DraftTrees.written(*arrays)

        return DraftTrees.scattered(draft_in_threads(budgets, draft), len(sequences))

    def observe_all(
        self,
        sequences: SequenceOf[SequenceMixer],
        accepted: Int32Array,
        offsets: Int32Array,
        feedback: StepFeedback | None,
    ) -> None:
        """Learns from accepted tokens and the model's predictions, and moves the sequences on.

        Args:
            accepted, offsets: as in `BatchStrategy.observe_all`.
            feedback: None where all of each draft was verified and the predictions are not known.
        """
        verified = _verified(accepted, offsets, feedback)
        drafted = max(one.struct.fields.draft.tokens.shape[0] for one in sequences)
        if verified.has_feedback:
            largest = int(segment_sizes(verified.offsets).max())
            drafted = max(drafted, largest)
            for one in sequences:
                one.reserve_tops(largest if verified.has_top_tokens else 0)
        table = self._no_table if self.table is None else self.table.struct
        addresses, done = addresses_of([one.struct for one in sequences]), 0
        workspace = _workspace(0, drafted).address
        while done < len(sequences):
            done = learn_all(
                addresses,
                done,
                *verified,
                table.address,
                self.model_table,
                self.table is not None,
                workspace,
            )
            if self.table is not None:
                self.table.grow()


class SequenceMixer:
    """One live sequence of a mixer. Its arrays grow with the drafts that are asked for.

    Args:
        learns: false to change nothing that the tenant's sequences share.

    Attributes:
        struct: its arrays.
    """

    def __init__(self, mixer: Mixer, prompt: Int32Array, learns: bool = True) -> None:
        self._mixer = mixer
        self.learns = learns
        # What it learns without `learns` is forgotten with it.
        self._weights = mixer.learned if learns else Struct(Weights(*(table.copy() for table in mixer.weights)))
        self.struct = Struct(new_sequence(prompt, self._weights.address, learns))

    @property
    def counts(self) -> Int64Array:
        """int64[2, SOURCES + 1], how many nodes of each source, the table last, were verified and accepted."""
        return self.struct.fields.counts

    @property
    def tail(self) -> Int32Array:
        """int32[ORDERS], its last tokens, the newest last; `NOWHERE` before its first one."""
        return self.struct.fields.tail

    def draft(self, trees: SequenceOf[DraftTree], budget: int) -> DraftTree:
        """As `Mixer.draft_all`, for this sequence alone."""
        each = [DraftTrees.of([tree]) for tree in trees]
        return self._mixer.draft_all([self], each, np.array([budget], np.int32))[0]

    def propose(self, budget: int) -> DraftTree:
        """A draft of the successor table alone."""
        return self.draft((), budget)

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        """As `Mixer.observe_all`, for this sequence alone."""
        offsets = np.array([0, accepted.shape[0]], np.int32)
        self._mixer.observe_all([self], accepted, offsets, None if feedback is None else StepFeedback.of(feedback))

    def close(self) -> None:
        """The tenant's table and weights keep what was learned."""

    def reserve(self, nodes: int, merged: int) -> None:
        """Makes space for a draft, and for the sources' trees; if there was less, the latest ones are lost."""
        arrays = self.struct.fields
        if arrays.draft.tokens.shape[0] < nodes:
            arrays = arrays._replace(draft=empty_draft(max(nodes, _LEAST_NODES)))
        if arrays.trees.chances.shape[0] < max(merged, 1):
            arrays = arrays._replace(trees=empty_trees(max(merged, _LEAST_NODES)))
        if arrays is not self.struct.fields:
            self.struct.set(arrays)

    def reserve_tops(self, rows: int) -> None:
        """Makes space for `top_tokens` of so many nodes; if there was less, the latest ones are lost."""
        if self.struct.fields.top.shape[0] < rows:
            self.struct.set(self.struct.fields._replace(top=np.empty((max(rows, _LEAST_TOPS), WIDTH), np.int32)))
            self.struct.fields.state["tops"] = 0


def _source_drafts(trees: SequenceOf[DraftTrees], sequences: int) -> SourceDrafts:
    """One after the other; without sources, no tree for any sequence."""
    if len(trees) == 1:
        only = trees[0]
        return SourceDrafts(only.tokens, only.parents, only.scores, only.offsets[None])
    firsts = np.cumsum([0, *(source.tokens.shape[0] for source in trees)])
    offsets = [source.offsets + np.int32(first) for source, first in zip(trees, firsts[:-1], strict=True)]
    return SourceDrafts(
        np.concatenate([EMPTY_TREE.tokens, *(source.tokens for source in trees)]),
        np.concatenate([EMPTY_TREE.parents, *(source.parents for source in trees)]),
        np.concatenate([EMPTY_TREE.scores, *(source.scores for source in trees)]),
        np.array(offsets, np.int32).reshape(len(trees), sequences + 1),
    )


def _verified(accepted: Int32Array, offsets: Int32Array, feedback: StepFeedback | None) -> Verified:
    if feedback is None:
        nowhere = np.zeros(offsets.shape[0], np.int32)
        return Verified(accepted, offsets, False, False, _NO_NODES, _NO_NODES, _NO_TOP_TOKENS, nowhere)
    top = feedback.top_tokens
    known = _NO_TOP_TOKENS if top is None else top
    return Verified(
        accepted, offsets, True, top is not None, feedback.tokens, feedback.parents, known, feedback.offsets
    )
