"""The arrays of the trie strategy's live sequences."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from draftwood_strategies.native import Float32Array, Int32Array
from draftwood_strategies.structs import record_dtype
from draftwood_strategies.trie.candidates import Candidates, Followed
from draftwood_strategies.trie.phrase_index import WRITER, IndexArrays

STATE = record_dtype(
    weights=np.int64, remembered=np.int64, prompt_end=np.int64, written=np.int64, roots=np.int64, drafted=np.int64
)
"""The address of the `Weights` that it drafts with and that it teaches, 1 if the memory learns what it writes, the
position in its own index where its output begins, how many of its last tokens the memory learns, and how many roots and
nodes its latest draft has."""


class TrieDraft(NamedTuple):
    """A draft, and what the calibration of its scores learns from.

    Attributes:
        tokens, parents, scores: int32[n], int32[n] and float32[n], as in `DraftTree`.
        shares, supports: float32[n] and int32[n], what `odds.chance` took for each node.
    """

    tokens: Int32Array
    parents: Int32Array
    scores: Float32Array
    shares: Float32Array
    supports: Int32Array


def empty_draft(budget: int) -> TrieDraft:
    """Space for a draft of `budget` nodes."""
    tokens, parents, supports = np.empty((3, budget), np.int32)
    scores, shares = np.empty((2, budget), np.float32)
    return TrieDraft(tokens, parents, scores, shares, supports)


class SequenceArrays(NamedTuple):
    """The arrays of a live sequence.

    Attributes:
        own, writer: its own index, and WRITER[1] there.
        memory_writer: WRITER[1] in the tenant's memory.
        state: STATE[1].
        followed: FOLLOWED[2], the positions that it follows in its own index and in the memory.
        roots: CANDIDATE[MOST_ROOTS], the candidates at the root of its latest draft.
        draft: space for its drafts.
    """

    own: IndexArrays
    writer: Annotated[Any, WRITER]
    memory_writer: Annotated[Any, WRITER]
    state: Annotated[Any, STATE]
    followed: Followed
    roots: Candidates
    draft: TrieDraft
