"""Several sources as one draft: trees of the tree-shaped ones and the successor table, mixed at every node.

Knows token ids only; nothing of tenants and strategies.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from draftwood_strategies.base import Feedback, Successors
from draftwood_strategies.draft import DraftTree
from draftwood_strategies.mixing.attribution import DraftedNodes, attribute
from draftwood_strategies.mixing.candidates import Workspace, workspace_for
from draftwood_strategies.mixing.expansion import MixedDraft, empty_draft, expand
from draftwood_strategies.mixing.learning import learn
from draftwood_strategies.mixing.source_trees import add_source, empty_source_trees
from draftwood_strategies.mixing.unused_nodes import FillWorkspace, fill, fill_workspace_for
from draftwood_strategies.mixing.weights import SOURCES, TABLE, Weights, prior_weights
from draftwood_strategies.native import Int32Array
from draftwood_strategies.successors import COLUMNS, NOWHERE, ORDERS, WIDTH
from draftwood_strategies.tree_index import NO_NODE

_NO_ROWS = np.empty((0, COLUMNS), np.int32)
_NO_NODES = np.empty(0, np.int32)
_NO_TOP_TOKENS = np.empty((0, WIDTH), np.int32)


class Mixer:
    """What a tenant's sequences share: the weights of the sources, and the successor table if it is one of them."""

    def __init__(self, table: Successors | None) -> None:
        self.table = table
        self.weights: Weights = prior_weights()
        self._budget = 0
        self._workspace: Workspace | None = None
        self._fill_workspace: FillWorkspace | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of table and weights; arrays of live sequences and workspaces are not counted."""
        return sum(weights.nbytes for weights in self.weights) + (0 if self.table is None else self.table.nbytes)

    def workspace(self, budget: int) -> Workspace:
        """A workspace for drafts of up to `budget` nodes."""
        if self._workspace is None or budget > self._budget:
            self._budget = max(budget, 64)
            self._workspace = workspace_for(self._budget)
        return self._workspace

    def fill_workspace(self, budget: int) -> FillWorkspace:
        """A workspace for filling drafts of up to `budget` nodes."""
        if self._fill_workspace is None or budget >= self._fill_workspace.left.shape[0]:
            self._fill_workspace = fill_workspace_for(max(budget, 64))
        return self._fill_workspace


class SequenceMixer:
    """One live sequence's end, and the sources' trees of its latest draft.

    Args:
        learns: false to change nothing that the tenant's sequences share.

    Attributes:
        counts: int64[2, SOURCES + 1], how many nodes of each source, the table last, were verified and accepted.
    """

    def __init__(self, mixer: Mixer, prompt: Int32Array, learns: bool = True) -> None:
        self._mixer = mixer
        self._learns = learns
        self._weights = mixer.weights if learns else Weights(*(table.copy() for table in mixer.weights))
        self.counts = np.zeros((2, SOURCES + 1), np.int64)
        tail = prompt[-ORDERS:]
        self._tail = np.full(ORDERS, NOWHERE, np.int32)
        self._tail[ORDERS - tail.shape[0] :] = tail
        self._draft: MixedDraft | None = None
        self._top_tokens: Int32Array | None = None
        self._trees = empty_source_trees(64)
        self._located = np.empty(64, np.int32)
        self._active = np.zeros(SOURCES + 1, np.int32)

    def draft(self, trees: SequenceOf[DraftTree | None], with_table: bool, budget: int) -> DraftTree:
        """A tree of at most `budget` nodes.

        Args:
            trees: the checked tree of each tree-shaped source in the order of their numbers, at most `SOURCES`; None
                for a source that does not take part.
            with_table: the successor table takes part.
        """
        self._merge(trees)
        table = self._mixer.table if with_table else None
        self._active[TABLE] = table is not None
        space, rows = empty_draft(budget), _NO_ROWS if table is None else table.rows
        n = expand(self._trees, self._weights, self._mixer.workspace(budget), rows, self._tail, space)
        if table is not None and self._top_tokens is not None and n < budget:
            n = fill(self._top_tokens, space, n, self._mixer.fill_workspace(budget))
        self._draft = draft = MixedDraft(space.tokens[:n], space.parents[:n], space.scores[:n], space.sources[:n])
        return DraftTree(draft.tokens, draft.parents, draft.scores)

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        """Learns from the accepted tokens and from the model's predictions, and moves on."""
        table = self._mixer.table
        if self._draft is not None:
            self._attribute(self._draft, accepted, feedback)
            rows = table.rows if table is not None and self._active[TABLE] else _NO_ROWS
            workspace = self._mixer.workspace(1)
            learn(self._trees, self._weights, workspace, rows, self._tail, accepted, self._active)
        if table is not None and self._learns:
            if feedback is None or feedback.top_tokens is None:
                table.note(self._tail, _NO_NODES, _NO_NODES, _NO_TOP_TOKENS)
            else:
                table.note(self._tail, feedback.tokens, feedback.parents, feedback.top_tokens)
        self._draft, self._top_tokens = None, None if feedback is None else feedback.top_tokens
        written = accepted[-ORDERS:]
        self._tail[: ORDERS - written.shape[0]] = self._tail[written.shape[0] :]
        self._tail[ORDERS - written.shape[0] :] = written

    def _attribute(self, draft: MixedDraft, accepted: Int32Array, feedback: Feedback | None) -> None:
        if feedback is not None:
            verified, parents = feedback.tokens, feedback.parents
        else:  # all of it
            verified = np.append(self._tail[-1:], draft.tokens)
            parents = np.append(np.int32(NO_NODE), draft.parents + 1)
        attribute(DraftedNodes(draft.tokens, draft.parents, draft.sources), verified, parents, accepted, self.counts)

    def _merge(self, trees: SequenceOf[DraftTree | None]) -> None:
        nodes = sum(len(tree) for tree in trees if tree is not None)
        if nodes > self._located.shape[0]:
            self._trees, self._located = empty_source_trees(nodes), np.empty(nodes, np.int32)
        self._trees.tree.first_child[0] = NO_NODE
        size = 0
        for source, tree in enumerate(trees):
            self._active[source] = tree is not None
            if tree is not None:
                size = add_source(self._trees, size, source, tree.tokens, tree.parents, tree.scores, self._located)
