"""The arrays of the trie strategy: those of live sequences, and the scratch arrays of a draft."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np

from draftwood_strategies.arrays import Float32Array, Int32Array, Int64Array
from draftwood_strategies.native import record_dtype
from draftwood_strategies.tree_index import FRONTIER_ENTRY, Frontier
from draftwood_strategies.trie.phrase_index import WAYS_BEFORE, WRITER, IndexArrays
from draftwood_strategies.trie.retrieval import CANDIDATE, CONTEXT, SEEN, Candidates
from draftwood_strategies.trie.weights import Weights

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
        shares, supports: float32[n] and int32[n], what `weights.chance` took for each node.
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
        text, writer: the index of its own text, and WRITER[1] there.
        memory_writer: WRITER[1] in the tenant's memory.
        state: STATE[1].
        followed: int64[2], the positions that it follows in its own index and in the memory, `NOWHERE` for none.
        roots: CANDIDATE[MOST_ROOTS], the candidates at the root of its latest draft.
        draft: space for its drafts.
    """

    text: IndexArrays
    writer: Annotated[Any, WRITER]
    memory_writer: Annotated[Any, WRITER]
    state: Annotated[Any, STATE]
    followed: Int64Array
    roots: Candidates
    draft: TrieDraft


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
how recently the sequence had its token, what speaks for it (see `weights.with_match`), its score and its share of the
votes."""
Nodes: TypeAlias = Annotated[Any, NODE]

DEEPEST = 256
"""The greatest branch length."""

LEAST_SCORE = 0.2
"""Divided by the budget, the least score that is worth a look into the odds, or a novel token. 0.05, 0.1 and 0.4 change
acceptance lengths by less than 0.1% (docs/decisions/trie-scores.md)."""
WIDENED = (2, 1, 1, 1, 1)
"""How many nodes of each depth a draft widens, from that of the root's children on. Six in all, as the candidates have
space for. Other sixes change acceptance lengths by -0.4 to +0.0% (docs/decisions/trie-scores.md)."""
WIDEN_BY, WIDEN_SCORE, NODES_PER_WIDENING = 5, 0.01, 5
"""Candidates that a widened node gets from each index besides its parent's, the score above which it gets them, and of
how many nodes of the budget one is widened. Without them acceptance lengths are 1.1% shorter. 8 candidates from a score
of 0.005 on, for 6 nodes of every draft, change them by 0.06% with 16 nodes and by nothing with 64, and a draft of 16
takes 30% longer (docs/decisions/trie-scores.md)."""
NOVEL_NODES = 32
"""Novel tokens that are drafted below a node at most, or the budget if that is less. 16 shorten acceptance lengths by
0.5% with 64 nodes, 64 change them by less than 0.1%."""
MOST_OWN, MOST_MEMORY = 64, 128
"""Candidates of a search in the own index and in the memory at most. With half as many more acceptance lengths grow by
0.2%, and a draft takes 15% longer with a million tokens in memory (docs/decisions/trie-scores.md)."""
MOST_ROOTS = MOST_OWN + MOST_MEMORY + 2
"""Bounds the candidates at the root: those of both searches, and the position that is followed in each index."""


class TrieWorkspace(NamedTuple):
    """Scratch arrays of a draft. Nothing in them outlives it.

    Attributes:
        candidates: CANDIDATE[m].
        trust: float32[m], each candidate's vote but for the factors of match length and token.
        chain: int32[m], the next candidate of the same node.
        nodes: NODE[k], the frontier and the draft.
        frontier: FRONTIER_ENTRY[b], nodes that may be drafted next, from the number of drafted nodes on.
        table: int32[t], t a power of two above m + NOVEL_NODES: nodes hashed by token.
        latest: int32[WAYS_BEFORE[-1]], the occurrences that a search has come to.
        seen: int32[SEEN], positions found in one search.
        path: int32[CONTEXT + DEEPEST], the end of the sequence, and the path to a node after it.
        marked: int32[CONTEXT], the end of the sequence with the start mark that the memory has in it.
        widenings: int32[len(WIDENED)], how many more nodes of each depth are widened.
    """

    candidates: Candidates
    trust: Float32Array
    chain: Int32Array
    nodes: Nodes
    frontier: Frontier
    table: Int32Array
    latest: Int32Array
    seen: Int32Array
    path: Int32Array
    marked: Int32Array
    widenings: Int32Array


def trie_workspace(budget: int) -> TrieWorkspace:
    """A workspace for trees of at most `budget` nodes."""
    candidates, nodes = MOST_ROOTS + 2 * WIDEN_BY * sum(WIDENED), 1024 + 32 * budget
    return TrieWorkspace(
        candidates=np.empty(candidates, CANDIDATE),
        trust=np.empty(candidates, np.float32),
        chain=np.empty(candidates, np.int32),
        nodes=np.empty(nodes, NODE),
        frontier=np.empty(budget + 1, FRONTIER_ENTRY),
        table=np.empty(1 << (candidates + NOVEL_NODES).bit_length(), np.int32),
        latest=np.empty(WAYS_BEFORE[-1], np.int32),
        seen=np.empty(SEEN, np.int32),
        path=np.empty(CONTEXT + DEEPEST, np.int32),
        marked=np.empty(CONTEXT, np.int32),
        widenings=np.empty(len(WIDENED), np.int32),
    )


class Drafting(NamedTuple):
    """What a sequence is drafted from.

    Attributes:
        sequence: its arrays.
        memory: the index of its tenant.
        weights: the weights that it drafts with.
        workspace: this thread's.
    """

    sequence: SequenceArrays
    memory: IndexArrays
    weights: Weights
    workspace: TrieWorkspace
