"""The arrays of a mixture's live sequences: each one's end, the sources' trees of its latest draft, and that draft."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from draftwood_strategies.mixing.expansion import MixedDraft
from draftwood_strategies.mixing.sources.source_trees import SourceTrees
from draftwood_strategies.mixing.weights import SOURCES
from draftwood_strategies.native import Int32Array, Int64Array
from draftwood_strategies.structs import record_dtype
from draftwood_strategies.successors import NOWHERE, ORDERS, WIDTH
from draftwood_strategies.tree_index import LINKED_NODE

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
    """Those of a sequence that begins with `prompt`, without space for a draft."""
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
