"""The live sequences of a mixture: each one's end, the sources' trees of its latest draft, and that draft."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from draftwood_strategies.mixing.expansion import MixedDraft
from draftwood_strategies.mixing.sources.source_trees import SourceTrees
from draftwood_strategies.mixing.weights import SOURCES
from draftwood_strategies.native import Int32Array, Int64Array
from draftwood_strategies.structs import Struct, record_dtype
from draftwood_strategies.successors import NOWHERE, ORDERS, WIDTH
from draftwood_strategies.tree_index import LINKED_NODE

STATE = record_dtype(drafted=np.int64, tops=np.int64)
"""How many nodes the latest draft has, and how many rows of `top_tokens` came of it; `UNKNOWN` for none of these."""
UNKNOWN = -1
_LEAST_NODES, _LEAST_TOPS = 16, 17
"""Of a draft, and of a verified tree, that there is space for."""


class SequenceArrays(NamedTuple):
    """The arrays of a live sequence.

    Attributes:
        trees, draft: of its latest draft.
        top: int32[n, WIDTH], the latest `top_tokens`.
        tail: int32[ORDERS], its last tokens, the newest last; `NOWHERE` before its first one.
        active: int32[SOURCES + 1], 1 for each source, the table last, that took part in its latest draft.
        counts: int64[2, SOURCES + 1], how many nodes of each source were verified and accepted.
        state: STATE[1].
    """

    trees: SourceTrees
    draft: MixedDraft
    top: Annotated[Int32Array, 2]
    tail: Int32Array
    active: Int32Array
    counts: Annotated[Int64Array, 2]
    state: Annotated[Any, STATE]


class MixedSequence:
    """One live sequence. Its arrays grow with the drafts that are asked for.

    Attributes:
        struct: its arrays.
    """

    def __init__(self, prompt: Int32Array) -> None:
        tail: Int32Array = np.full(ORDERS, NOWHERE, np.int32)
        known = prompt[-ORDERS:]
        tail[ORDERS - known.shape[0] :] = known
        self.struct = Struct(
            SequenceArrays(
                trees=_empty_trees(0),
                draft=_empty_draft(0),
                top=np.empty((0, WIDTH), np.int32),
                tail=tail,
                active=np.zeros(SOURCES + 1, np.int32),
                counts=np.zeros((2, SOURCES + 1), np.int64),
                state=np.array([(UNKNOWN, UNKNOWN)], STATE),
            )
        )

    @property
    def counts(self) -> Int64Array:
        """int64[2, SOURCES + 1], how many nodes of each source, the table last, were verified and accepted."""
        return self.struct.fields.counts

    @property
    def tail(self) -> Int32Array:
        """int32[ORDERS], its last tokens, the newest last; `NOWHERE` before its first one."""
        return self.struct.fields.tail

    def reserve(self, nodes: int, merged: int) -> None:
        """Makes space for a draft, and for the sources' trees; if there was less, the latest ones are lost."""
        arrays = self.struct.fields
        if arrays.draft.tokens.shape[0] < nodes:
            arrays = arrays._replace(draft=_empty_draft(max(nodes, _LEAST_NODES)))
        if arrays.trees.chances.shape[0] < max(merged, 1):
            arrays = arrays._replace(trees=_empty_trees(max(merged, _LEAST_NODES)))
        if arrays is not self.struct.fields:
            self.struct.set(arrays)

    def reserve_tops(self, rows: int) -> None:
        """Makes space for `top_tokens` of so many nodes; if there was less, the latest ones are lost."""
        if self.struct.fields.top.shape[0] < rows:
            self.struct.set(self.struct.fields._replace(top=np.empty((max(rows, _LEAST_TOPS), WIDTH), np.int32)))
            self.struct.fields.state["tops"] = UNKNOWN


def _empty_trees(nodes: int) -> SourceTrees:
    return SourceTrees(np.empty(nodes + 1, LINKED_NODE), np.empty((nodes, SOURCES), np.float32))


def _empty_draft(nodes: int) -> MixedDraft:
    tokens, parents, sources = np.empty((3, nodes), np.int32)
    return MixedDraft(tokens, parents, np.empty(nodes, np.float32), sources)
