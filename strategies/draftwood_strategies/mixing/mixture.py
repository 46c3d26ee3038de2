"""Several sources as one draft: trees of the tree-shaped ones and the successor table, mixed at every node.

Knows token ids only; nothing of tenants and strategies.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from draftwood_strategies.arrays import Int32Array, Int64Array, segment_sizes
from draftwood_strategies.base import Feedback, StepFeedback
from draftwood_strategies.built_in import RecyclingOptions
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, DraftTrees, tree_arrays
from draftwood_strategies.mixing.candidates import Weights, mixing_workspace, prior_weights
from draftwood_strategies.mixing.drafting import SourceDrafts, draft_all, empty_draft, empty_trees, new_sequence
from draftwood_strategies.mixing.learning import Verified, learn_all
from draftwood_strategies.native import Struct, Workspaces, addresses_of
from draftwood_strategies.successors import COLUMNS, WIDTH, SuccessorTable, table_arrays
from draftwood_strategies.threads import draft_in_threads

NO_ROWS = np.empty((0, COLUMNS), np.int32)
_NO_NODES = np.empty(0, np.int32)
_NO_TOP_TOKENS = np.empty((0, WIDTH), np.int32)
_LEAST_NODES, _LEAST_TOPS = 16, 17
"""Of a draft, and of a verified tree, that a sequence has space for once it has any."""
_workspaces = Workspaces(mixing_workspace, 64, 64)


class Mixture:
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
        sequences: SequenceOf[MixtureDrafter],
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
        for sequence in sequences:
            sequence.reserve(nodes, merged)
        largest = int(sizes.max()) if trees else 0
        addresses = addresses_of([sequence.struct for sequence in sequences])
        table = NO_ROWS if self.table is None else self.table.rows

        def draft(rows: range) -> DraftTrees:
            group = budgets[rows.start : rows.stop]
            arrays = tree_arrays(len(rows), int(group.sum()))
            draft_all(
                addresses[rows.start : rows.stop],
                group,
                sources.tokens,
                sources.parents,
                sources.scores,
                np.ascontiguousarray(sources.offsets[:, rows.start : rows.stop + 1]),
                table,
                self.model_table,
                _workspaces.address(nodes, largest),
                *arrays,
            )
            return DraftTrees.written(*arrays)

        return DraftTrees.scattered(draft_in_threads(budgets, draft), len(sequences))

    def observe_all(
        self,
        sequences: SequenceOf[MixtureDrafter],
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
        drafted = max(sequence.struct.fields.draft.tokens.shape[0] for sequence in sequences)
        if verified.has_feedback:
            largest = int(segment_sizes(verified.offsets).max())
            drafted = max(drafted, largest)
            for sequence in sequences:
                sequence.reserve_tops(largest if verified.has_top_tokens else 0)
        table = self._no_table if self.table is None else self.table.struct
        addresses, done = addresses_of([sequence.struct for sequence in sequences]), 0
        workspace = _workspaces.address(0, drafted)
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


class MixtureDrafter:
    """One live sequence of a mixture; the drafter of `recycling`. Its arrays grow with the drafts that are asked for.

    Args:
        learns: false to change nothing that the tenant's sequences share.

    Attributes:
        struct: its arrays.
    """

    def __init__(self, mixture: Mixture, prompt: Int32Array, learns: bool = True) -> None:
        self.mixture = mixture
        self.learns = learns
        # What it learns without `learns` is forgotten with it.
        self._weights = mixture.learned if learns else Struct(Weights(*(table.copy() for table in mixture.weights)))
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
        """As `Mixture.draft_all`, for this sequence alone."""
        each = [DraftTrees.of([tree]) for tree in trees]
        return self.mixture.draft_all([self], each, np.array([budget], np.int32))[0]

    def propose(self, budget: int) -> DraftTree:
        """A draft of the successor table alone."""
        return self.draft((), budget)

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        """As `Mixture.observe_all`, for this sequence alone."""
        offsets = np.array([0, accepted.shape[0]], np.int32)
        self.mixture.observe_all([self], accepted, offsets, None if feedback is None else StepFeedback.of(feedback))

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


class RecyclingStrategy:
    """One tenant's successor table; a `SuccessorSource`.

    Args:
        options: those of `RecyclingOptions`, by name.

    Raises:
        ValueError: the option's value is not allowed.
    """

    top_k = WIDTH

    def __init__(self, **options: Any) -> None:
        self.options = RecyclingOptions(**options)
        self.successors = SuccessorTable(self.options.capacity_contexts)
        self.mixture = Mixture(self.successors)

    @property
    def nbytes(self) -> int:
        """Bytes of table and weights."""
        return self.mixture.nbytes

    def set_model_table(self, rows: Int32Array) -> None:
        self.mixture.model_table = rows

    def keep_learned(self, earlier: RecyclingStrategy) -> None:
        self.successors, self.mixture = earlier.successors, earlier.mixture

    def start(self, prompt: Int32Array) -> MixtureDrafter:
        return MixtureDrafter(self.mixture, prompt)

    def start_read_only(self, prompt: Int32Array) -> MixtureDrafter:
        return MixtureDrafter(self.mixture, prompt, learns=False)

    def propose_all(self, drafters: SequenceOf[MixtureDrafter], budgets: Int32Array) -> DraftTrees:
        return self.mixture.draft_all(drafters, (), budgets)

    def observe_all(
        self,
        drafters: SequenceOf[MixtureDrafter],
        accepted: Int32Array,
        offsets: Int32Array,
        feedback: StepFeedback | None,
    ) -> None:
        self.mixture.observe_all(drafters, accepted, offsets, feedback)
