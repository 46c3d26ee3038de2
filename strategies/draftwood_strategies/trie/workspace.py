"""The scratch arrays of a draft of the trie strategy."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np

from draftwood_strategies.frontier import FRONTIER_ENTRY, Frontier
from draftwood_strategies.native import Float32Array, Int32Array
from draftwood_strategies.structs import record_dtype
from draftwood_strategies.trie.candidates import CANDIDATE, Candidates
from draftwood_strategies.trie.retrieval import CONTEXT, SEEN

NODE = record_dtype(
    token=np.int32,
    parent=np.int32,
    first=np.int32,
    depth=np.int32,
    recent=np.int32,
    support=np.int32,
    score=np.float32,
    share=np.float32,
)
"""A node of the frontier or the draft: its token, its parent in the draft, its first candidate, its depth, the bin of
how recently the sequence had its token, what speaks for it (see `odds`), its score and its share of the votes."""
Nodes: TypeAlias = Annotated[Any, NODE]

DEEPEST = 256
"""The greatest branch length."""

WIDEN_BY, WIDEN_SCORE, WIDEN_TIMES, NODES_PER_WIDENING = 5, 0.01, 6, 5
"""Candidates that a node gets from each index besides its parent's, the score above which it gets them, how many nodes
of a draft do, and of how many nodes of the budget one does. Without them acceptance lengths are 1.1% shorter. 8
candidates from a score of 0.005 on, for 6 nodes of every draft, change them by 0.06% with 16 nodes and by nothing with
64, and a draft of 16 takes 30% longer (docs/decisions, "One call for a batch")."""
MOST_ROOTS = 768
"""Bounds the candidates at the root: more than the searches find."""


class Workspace(NamedTuple):
    """Scratch arrays of a draft. Nothing in them outlives it.

    Attributes:
        candidates: CANDIDATE[m].
        trust: float32[m], each candidate's vote but for the factors of match length and token.
        chain: int32[m], the next candidate of the same node.
        nodes: NODE[k], the frontier and the draft.
        frontier: FRONTIER_ENTRY[b], nodes that may be drafted next, from the number of drafted nodes on.
        table: int32[t], t a power of two above m: nodes hashed by token.
        seen: int32[SEEN], positions found in one search.
        path: int32[CONTEXT + DEEPEST], the end of the sequence, and the path to a node after it.
        marked: int32[CONTEXT], the end of the sequence with the start mark that the memory has in it.
    """

    candidates: Candidates
    trust: Float32Array
    chain: Int32Array
    nodes: Nodes
    frontier: Frontier
    table: Int32Array
    seen: Int32Array
    path: Int32Array
    marked: Int32Array


def workspace_for(budget: int) -> Workspace:
    """A workspace for trees of at most `budget` nodes."""
    candidates, nodes = MOST_ROOTS + 2 * WIDEN_BY * WIDEN_TIMES, 1024 + 32 * budget
    return Workspace(
        candidates=np.empty(candidates, CANDIDATE),
        trust=np.empty(candidates, np.float32),
        chain=np.empty(candidates, np.int32),
        nodes=np.empty(nodes, NODE),
        frontier=np.empty(budget + 1, FRONTIER_ENTRY),
        table=np.empty(1 << candidates.bit_length(), np.int32),
        seen=np.empty(SEEN, np.int32),
        path=np.empty(CONTEXT + DEEPEST, np.int32),
        marked=np.empty(CONTEXT, np.int32),
    )
