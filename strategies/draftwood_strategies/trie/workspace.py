"""The scratch arrays of a draft of the trie strategy, and the draft that is made in them."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np

from draftwood_strategies.native import Float32Array, Int32Array, Integer, compiled
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
        frontier: int32[k], nodes that may be drafted next, from the number of drafted nodes on, the best first.
        table: int32[t], t a power of two above m: nodes hashed by token.
        seen: int32[SEEN], positions found in one search.
        path: int32[CONTEXT + DEEPEST], the end of the sequence, and the path to a node after it.
        marked: int32[CONTEXT], the end of the sequence with the start mark that the memory has in it.
    """

    candidates: Candidates
    trust: Float32Array
    chain: Int32Array
    nodes: Nodes
    frontier: Int32Array
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
        frontier=np.empty(nodes, np.int32),
        table=np.empty(1 << candidates.bit_length(), np.int32),
        seen=np.empty(SEEN, np.int32),
        path=np.empty(CONTEXT + DEEPEST, np.int32),
        marked=np.empty(CONTEXT, np.int32),
    )


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


@compiled
def offer(frontier: Int32Array, begin: int, end: int, wanted: int, nodes: Nodes, node: Integer) -> int:
    """Puts a node into the frontier if it is among the `wanted` best; returns the new end.

    The frontier are the nodes that may be drafted next, the best score first.

    Args:
        frontier: int32[k]; the frontier is `frontier[begin:end]`.
    """
    score = nodes[node].score
    if end - begin == wanted:
        if score <= nodes[frontier[end - 1]].score:
            return end
        end -= 1
    at = end
    while at > begin and nodes[frontier[at - 1]].score < score:
        frontier[at] = frontier[at - 1]
        at -= 1
    frontier[at] = node
    return end + 1
