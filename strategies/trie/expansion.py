"""One draft of the trie strategy: retrieve, vote, take the most probable nodes first.

At every node each candidate that agrees with the path so far votes for the token that follows there; where a node's
token occurs elsewhere, after something else, those places join. Knows nothing of tenants and strategies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strategies.draft import Float32Array, Int32Array
from strategies.native import Int64Array, Integer, Real, compiled
from strategies.trie.phrase_index import NOWHERE, View, following
from strategies.trie.retrieval import (
    AT,
    COLUMNS,
    CONTEXT,
    LENGTH,
    NEAR,
    SEEN,
    SHORTER,
    complete,
    copy_candidate,
    in_memory,
    log2_bin,
    mark_start,
    near_bin,
    read_context,
    recent_bin,
    resume,
    search,
    search_token,
)
from strategies.trie.weights import (
    COUNT_BINS,
    Float32Table,
    Weights,
    calibrated,
    length_at,
    trust_of,
    weight_of,
)

DEEPEST = 256
"""The greatest branch length."""

_MOST_OWN, _MOST_MEMORY, _MOST_SUBSTITUTED = 48, 96, 16
_WIDEN_BY, _WIDEN_SCORE, _WIDEN_TIMES = 8, 0.005, 6
_ROOTS = 768

AT_END, OWNER_NUMBER, PROMPT_END, WRITTEN = range(4)
"""Where a sequence stands: its last position in its own index, its owner number in the memory, the position in its
own index where its output begins, and how many of its last tokens are what the memory learns of it."""

_TOKEN, _PARENT, _FIRST, _DEPTH, _LONGEST, _RECENT = range(6)
"""Columns of a node: its token, its parent in the draft, its first candidate, its depth, the longest match among the
candidates of its parent, and the bin of how recently the sequence had its token."""


class Room(NamedTuple):
    """Room to draft in. Holds nothing between two drafts.

    Attributes:
        candidates: int32[m, COLUMNS].
        trust: float32[m], each candidate's vote but for match length and token.
        chain: int32[m], the next candidate of the same node.
        nodes: int32[k, 6], the frontier and the draft.
        scores: float32[k, 2], each node's score and its share of the votes.
        heap: int32[k], the frontier's nodes, the best first.
        table: int32[t], t a power of two above m: nodes hashed by token.
        seen: int32[SEEN], places found in one search.
        path: int32[CONTEXT + DEEPEST], the end of the sequence, and the path to a node after it.
        marked: int32[CONTEXT], the end of the sequence as the memory knows it.
        roots: int32[r, COLUMNS], set to the candidates at the root.
    """

    candidates: Int32Array
    trust: Float32Array
    chain: Int32Array
    nodes: Int32Array
    scores: Float32Table
    heap: Int32Array
    table: Int32Array
    seen: Int32Array
    path: Int32Array
    marked: Int32Array
    roots: Int32Array


def room_for(budget: int) -> Room:
    """Room for trees of at most `budget` nodes."""
    candidates, nodes = _ROOTS + 2 * _WIDEN_BY * _WIDEN_TIMES, 1024 + 32 * budget
    return Room(
        candidates=np.empty((candidates, COLUMNS), np.int32),
        trust=np.empty(candidates, np.float32),
        chain=np.empty(candidates, np.int32),
        nodes=np.empty((nodes, 6), np.int32),
        scores=np.empty((nodes, 2), np.float32),
        heap=np.empty(nodes, np.int32),
        table=np.empty(1 << candidates.bit_length(), np.int32),
        seen=np.empty(SEEN, np.int32),
        path=np.empty(CONTEXT + DEEPEST, np.int32),
        marked=np.empty(CONTEXT, np.int32),
        roots=np.empty((_ROOTS, COLUMNS), np.int32),
    )


@compiled
def draft(
    own_log: Int32Array,
    own_links: Int32Array,
    own_heads: Int32Array,
    own_blocks: Int32Array,
    memory_log: Int32Array,
    memory_links: Int32Array,
    memory_heads: Int32Array,
    memory_blocks: Int32Array,
    features: Float32Table,
    escapes: Float32Table,
    calibration: Float32Table,
    candidates: Int32Array,
    trust: Float32Array,
    chain: Int32Array,
    nodes: Int32Array,
    node_scores: Float32Table,
    heap: Int32Array,
    table: Int32Array,
    seen: Int32Array,
    path: Int32Array,
    marked: Int32Array,
    roots: Int32Array,
    place: Int64Array,
    followed: Int64Array,
    branch_length: int,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    shares: Float32Array,
    longest: Int32Array,
) -> tuple[int, int]:
    """Drafts at most `tokens.shape[0]` nodes.

    Args:
        own_log to roots: two `View`s, `Weights` and `Room`, laid out flat.
        place: int64[4], see `AT_END` and the others.
        followed: int64[4], the places that the sequence follows, see `phrase_learning`.
        tokens, parents, scores: [budget], set to the tree.
        shares, longest: [budget], set to what each score was calibrated from.

    Returns:
        The number of nodes and the number of candidates at the root.
    """
    own = View(own_log, own_links, own_heads, own_blocks)
    memory = View(memory_log, memory_links, memory_heads, memory_blocks)
    weights = Weights(features, escapes, calibration)
    room = Room(candidates, trust, chain, nodes, node_scores, heap, table, seen, path, marked, roots)
    root_count = _retrieve(own, memory, weights, room, place, followed)
    for slot in range(table.shape[0]):
        table[slot] = -1
    count = root_count
    first: Integer = 0 if count else -1
    parent = -1
    depth: Integer = 0
    score: Real = np.float32(1.0)
    made, waiting, drafted, widened = 0, 0, 0, 0
    while True:
        if 0 < depth < branch_length and score > _WIDEN_SCORE and widened < _WIDEN_TIMES:
            widened += 1
            node: Integer = parent
            for back in range(depth):
                path[CONTEXT + depth - 1 - back] = tokens[node]
                node = parents[node]
            first, count = _widen(own, memory, weights, room, place, followed, depth, first, count)
        if first >= 0 and depth < branch_length:
            before = made
            made = _vote(own, memory, weights, room, place[AT_END], first, parent, depth, score, made)
            for new in range(before, made):
                _push(heap, waiting, node_scores, new)
                waiting += 1
        if waiting == 0:
            return drafted, root_count
        node = _pop(heap, waiting, node_scores)
        waiting -= 1
        score = node_scores[node, 0]
        tokens[drafted] = nodes[node, _TOKEN]
        parents[drafted] = nodes[node, _PARENT]
        scores[drafted] = score
        shares[drafted] = node_scores[node, 1]
        longest[drafted] = nodes[node, _LONGEST]
        parent, depth, first = drafted, nodes[node, _DEPTH], nodes[node, _FIRST]
        drafted += 1
        if drafted == tokens.shape[0]:
            return drafted, root_count


@compiled
def _retrieve(own: View, memory: View, weights: Weights, room: Room, place: Int64Array, followed: Int64Array) -> int:
    """Fills the room with the candidates at the root, chained; returns how many there are."""
    read_context(own, place[AT_END], room.path)
    mark_start(room.path, place[WRITTEN], room.marked)
    mine, prompt, n = place[OWNER_NUMBER], place[PROMPT_END], CONTEXT
    found = room.candidates
    end = search(own, room.path, n, 0, NOWHERE, prompt, _MOST_OWN, room.seen, found, 0)
    end = search(memory, room.marked, n, 0, mine, NOWHERE, _MOST_MEMORY, room.seen, found, end)
    for replaced in range(1, 3):
        end = search(own, room.path, n, replaced, NOWHERE, prompt, _MOST_SUBSTITUTED, room.seen, found, end)
        end = search(memory, room.marked, n, replaced, mine, NOWHERE, _MOST_SUBSTITUTED, room.seen, found, end)
    end = resume(own, room.path, n, followed[0], prompt, found, end)
    end = resume(memory, room.marked, n, followed[1], NOWHERE, found, end)
    end = min(end, _ROOTS)
    complete(found, end, followed)
    for j in range(end):
        copy_candidate(found, j, room.roots, j)
        room.trust[j] = trust_of(found, j, weights.features)
        room.chain[j] = j + 1 if j + 1 < end else -1
    return end


@compiled
def _vote(
    own: View,
    memory: View,
    weights: Weights,
    room: Room,
    own_at: Integer,
    first: Integer,
    parent: int,
    depth: Integer,
    score: Real,
    made: int,
) -> int:
    """Moves the candidates from `first` on by one token and groups them into nodes from `made` on.

    Returns how many nodes are made then; their chains are disjoint parts of the one from `first`.
    """
    candidates, nodes, scores = room.candidates, room.nodes, room.scores
    begin = made
    total: Real = np.float32(0.0)
    longest: Integer = 0
    votes = 0
    j: Integer = first
    while j >= 0:
        rest = room.chain[j]
        index = memory if in_memory(candidates, j) else own
        at = following(index, candidates[j, AT])
        if at >= 0 and index.log[at] >= 0:
            candidates[j, AT] = at
            node, made = _node_for(own, room, own_at, index.log[at], parent, depth, begin, made)
            if node >= 0:
                weight = weight_of(candidates, j, room.trust[j], depth, nodes[node, _RECENT], weights.features)
                longest = max(longest, length_at(candidates, j, depth))
                votes += 1
                total += weight
                scores[node, 1] += weight
                room.chain[j] = nodes[node, _FIRST]
                nodes[node, _FIRST] = j
        j = rest
    total += weights.escapes[longest, log2_bin(votes, COUNT_BINS)]
    for node in range(begin, made):
        share = scores[node, 1] / total
        nodes[node, _LONGEST] = longest
        scores[node, 1] = share
        scores[node, 0] = score * calibrated(weights.calibration, depth, longest, share)
    return made


@compiled
def _node_for(
    own: View, room: Room, own_at: Integer, token: Integer, parent: int, depth: Integer, begin: int, made: int
) -> tuple[Integer, int]:
    """The node of `token` among those from `begin` on, made where there is none; -1 where there is no room for it.

    The hash table holds nodes of other parents as well: they are below `begin`.
    """
    nodes, table = room.nodes, room.table
    slot = (np.int64(token) * 0x9E3779B1 >> 8) & (table.shape[0] - 1)
    while table[slot] >= begin and nodes[table[slot], _TOKEN] != token:
        slot = (slot + 1) & (table.shape[0] - 1)
    if table[slot] >= begin:
        return table[slot], made
    if made == nodes.shape[0]:
        return -1, made
    table[slot] = made
    nodes[made, _TOKEN] = token
    nodes[made, _PARENT] = parent
    nodes[made, _FIRST] = -1
    nodes[made, _DEPTH] = depth + 1
    nodes[made, _RECENT] = recent_bin(own, own_at, token)
    room.scores[made, 1] = 0.0
    return made, made + 1


@compiled
def _widen(
    own: View,
    memory: View,
    weights: Weights,
    room: Room,
    place: Int64Array,
    followed: Int64Array,
    depth: Integer,
    first: Integer,
    count: int,
) -> tuple[Integer, int]:
    """Adds to a node's candidates the places where its token, the last of the path, comes after something else.

    Returns the new first candidate and the new count of candidates.
    """
    candidates, chain, n = room.candidates, room.chain, CONTEXT + depth
    end = search_token(own, room.path, n, NOWHERE, place[PROMPT_END], _WIDEN_BY, candidates, count)
    end = search_token(memory, room.path, n, place[OWNER_NUMBER], NOWHERE, _WIDEN_BY, candidates, end)
    kept = count
    for found in range(count, end):
        remembered = in_memory(candidates, found)
        known = False
        j = first
        while j >= 0 and not known:
            known = candidates[j, AT] == candidates[found, AT] and in_memory(candidates, j) == remembered
            j = chain[j]
        if known:
            continue
        copy_candidate(candidates, found, candidates, kept)
        candidates[kept, LENGTH] -= depth
        candidates[kept, NEAR] = near_bin(candidates[kept, AT] - depth, followed[1 if remembered else 0])
        candidates[kept, SHORTER] = 1
        room.trust[kept] = trust_of(candidates, kept, weights.features)
        chain[kept] = first
        first = kept
        kept += 1
    return first, kept


@compiled
def _push(heap: Int32Array, size: int, scores: Float32Table, node: Integer) -> None:
    """Adds a node to the heap of `size` nodes."""
    i = size
    while i > 0:
        above = (i - 1) >> 1
        if scores[heap[above], 0] >= scores[node, 0]:
            break
        heap[i] = heap[above]
        i = above
    heap[i] = node


@compiled
def _pop(heap: Int32Array, size: int, scores: Float32Table) -> int:
    """Takes the best node from the heap of `size` nodes."""
    best = heap[0]
    last = heap[size - 1]
    i = 0
    while True:
        below = 2 * i + 1
        if below >= size - 1:
            break
        if below + 1 < size - 1 and scores[heap[below + 1], 0] > scores[heap[below], 0]:
            below += 1
        if scores[heap[below], 0] <= scores[last, 0]:
            break
        heap[i] = heap[below]
        i = below
    heap[i] = last
    return int(best)
