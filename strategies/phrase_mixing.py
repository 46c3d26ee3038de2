"""From candidates to a draft tree, and from what came true to better weights.

At every node of the tree each candidate that agrees with the path so far votes for the token that follows there. A
vote weighs what its features say: a weight for each (source, match length), (source, agreement behind), and so on,
multiplied. The probability of a token is its share of all votes, of which one goes to "something else" (the escape
of prediction by partial matching, PPM). All weights are learned online by gradient ascent on the logarithm of the
probability of what came, as the mixing weights of PAQ compressors are; multiplicative updates keep them positive. A
last table, bilinear in (depth, longest match, probability), turns shares into acceptance rates (PAQ's adaptive
probability maps), so that the scores of a tree add up to the tokens that it will bring.

Knows nothing of tenants and strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.draft import Float32Array, Int32Array
from strategies.native import compiled
from strategies.phrase_index import Int64Array, following
from strategies.phrase_retrieval import (
    AGREEING,
    AGREEING_BINS,
    AT,
    COLUMNS,
    CONTEXT,
    KIND,
    LENGTH,
    LONGEST,
    MEMORY,
    NEAR,
    NEAR_BINS,
    NEWER,
    NEWER_BINS,
    SEEN,
    SHORTER,
    SHORTER_BINS,
    SUBSTITUTED,
    log2_bin,
    near_bin,
    search_token,
)

Float32Table: TypeAlias = npt.NDArray[np.float32]

AGREEING_AT = LONGEST + 1
NEWER_AT = AGREEING_AT + AGREEING_BINS
NEAR_AT = NEWER_AT + NEWER_BINS
SHORTER_AT = NEAR_AT + NEAR_BINS
FEATURES = SHORTER_AT + SHORTER_BINS
COUNT_BINS = 6
DEPTH_BINS, LENGTH_BINS, SHARE_BINS = 4, 9, 16

DEEPEST = 256
"""The greatest branch length."""
_ROOTS = 768

_RATE = 0.02
_CALIBRATION_RATE = 0.005
_LEAST, _GREATEST = 1e-4, 1e5

TOKEN, PARENT, FIRST, DEPTH, LONGEST_HERE = range(5)
"""Columns of a node: its token, its parent in the draft, its first candidate, its depth, and the longest match among
the candidates of its parent."""
NODE_COLUMNS = 5


@dataclass(frozen=True, eq=False)
class Weights:
    """What a tenant's traffic taught about trust.

    Attributes:
        features: float32[KINDS, FEATURES], the factors of a vote.
        escapes: float32[LONGEST + 1, COUNT_BINS], the weight of "something else", by the longest match and the
            number of votes.
        calibration: float32[DEPTH_BINS, LENGTH_BINS, SHARE_BINS], acceptance rate over share of votes.
    """

    features: Float32Table
    escapes: Float32Table
    calibration: Float32Table

    @property
    def nbytes(self) -> int:
        return self.features.nbytes + self.escapes.nbytes + self.calibration.nbytes


@dataclass(frozen=True, eq=False)
class Scratch:
    """Room to draft in, for trees of at most `budget` nodes. Holds nothing between two drafts.

    Attributes:
        candidates: int32[m, COLUMNS].
        trust: float32[m], each candidate's vote without its match length.
        chain: int32[m], the next candidate of the same node.
        nodes: int32[k, NODE_COLUMNS], the frontier and the draft.
        scores: float32[k, 2], each node's score and its share of the votes.
        heap: int32[k], the frontier's nodes, the best first.
        table: int32[t], t a power of two above m: the nodes of one parent, hashed by token. A stale entry does no
            harm: it names no node of this parent, or one with another token.
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

    @classmethod
    def of(cls, budget: int) -> Scratch:
        candidates, nodes = 768 + 8 * budget, 1024 + 32 * budget
        return cls(
            np.empty((candidates, COLUMNS), np.int32),
            np.empty(candidates, np.float32),
            np.empty(candidates, np.int32),
            np.empty((nodes, NODE_COLUMNS), np.int32),
            np.empty((nodes, 2), np.float32),
            np.empty(nodes, np.int32),
            np.empty(1 << candidates.bit_length(), np.int32),
            np.empty(SEEN, np.int32),
            np.empty(CONTEXT + DEEPEST, np.int32),
            np.empty(CONTEXT, np.int32),
            np.empty((_ROOTS, COLUMNS), np.int32),
        )


@compiled
def copy_candidate(source: Int32Array, i: int, target: Int32Array, j: int) -> None:
    """`target[j] = source[i]`, without the cost of array views."""
    for column in range(COLUMNS):
        target[j, column] = source[i, column]


@compiled
def trust_of(candidates: Int32Array, j: int, features: Float32Table) -> float:
    """The part of a candidate's vote that stays the same along a path."""
    kind = candidates[j, KIND]
    return (
        features[kind, AGREEING_AT + candidates[j, AGREEING]]
        * features[kind, NEWER_AT + candidates[j, NEWER]]
        * features[kind, NEAR_AT + candidates[j, NEAR]]
        * features[kind, SHORTER_AT + candidates[j, SHORTER]]
    )


@compiled
def complete_features(candidates: Int32Array, count: int, followed: Int64Array) -> None:
    """Fills the columns that need all candidates, or the place that the sequence follows."""
    longest = 0
    for j in range(count):
        if candidates[j, KIND] < SUBSTITUTED:
            longest = max(longest, candidates[j, LENGTH])
    for j in range(count):
        in_memory = candidates[j, KIND] % SUBSTITUTED == MEMORY
        candidates[j, NEAR] = near_bin(candidates[j, AT], followed[1 if in_memory else 0])
        candidates[j, SHORTER] = 1 if candidates[j, LENGTH] < longest else 0


@compiled
def calibration_cell(depth: int, longest: int, share: float) -> tuple[int, int, int, float]:
    """Indices of the lower of two neighbouring cells, and the weight of the upper."""
    place = share * SHARE_BINS - 0.5
    lower = max(0, min(SHARE_BINS - 2, int(place)))
    upper_weight = min(1.0, max(0.0, place - lower))
    return min(depth, DEPTH_BINS - 1), min(longest, LENGTH_BINS - 1), lower, upper_weight


@compiled
def calibrated(calibration: Float32Table, depth: int, longest: int, share: float) -> float:
    """The acceptance rate of a token with this share of the votes."""
    d, m, lower, w = calibration_cell(depth, longest, share)
    factor = calibration[d, m, lower] * (1.0 - w) + calibration[d, m, lower + 1] * w
    return min(1.0, share * factor)


@compiled
def push(heap: Int32Array, size: int, scores: Float32Table, node: int) -> None:
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
def pop(heap: Int32Array, size: int, scores: Float32Table) -> int:
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


@compiled
def vote(
    own_log: Int32Array,
    own_blocks: Int32Array,
    memory_log: Int32Array,
    memory_blocks: Int32Array,
    features: Float32Table,
    escapes: Float32Table,
    calibration: Float32Table,
    candidates: Int32Array,
    trust: Float32Array,
    chain: Int32Array,
    nodes: Int32Array,
    scores: Float32Table,
    table: Int32Array,
    first: int,
    parent: int,
    depth: int,
    score: float,
    n: int,
) -> int:
    """Moves the candidates from `first` on by one token and groups them into nodes from `n` on.

    Returns how many nodes there are then; their chains are disjoint parts of the one from `first`.
    """
    begin = n
    total = np.float32(0.0)
    longest = 0
    votes = 0
    j = first
    while j >= 0:
        rest = chain[j]
        kind = candidates[j, KIND]
        if kind % SUBSTITUTED == MEMORY:
            at = following(memory_blocks, candidates[j, AT])
            token = memory_log[at] if at >= 0 else -1
        else:
            at = following(own_blocks, candidates[j, AT])
            token = own_log[at] if at >= 0 else -1
        if token >= 0:
            candidates[j, AT] = at
            length = min(candidates[j, LENGTH] + depth, LONGEST)
            longest = max(longest, length)
            weight = features[kind, length] * trust[j]
            total += weight
            votes += 1
            slot = (np.int64(token) * 0x9E3779B1 >> 8) & (table.shape[0] - 1)
            node = table[slot]
            while begin <= node < n and nodes[node, TOKEN] != token:
                slot = (slot + 1) & (table.shape[0] - 1)
                node = table[slot]
            if not begin <= node < n and n < nodes.shape[0]:
                node = n
                table[slot] = n
                nodes[n, TOKEN] = token
                nodes[n, PARENT] = parent
                nodes[n, FIRST] = -1
                nodes[n, DEPTH] = depth + 1
                scores[n, 1] = 0.0
                n += 1
            if begin <= node < n:
                scores[node, 1] += weight
                chain[j] = nodes[node, FIRST]
                nodes[node, FIRST] = j
        j = rest
    total += escapes[longest, log2_bin(votes, COUNT_BINS)]
    for node in range(begin, n):
        share = scores[node, 1] / total
        nodes[node, LONGEST_HERE] = longest
        scores[node, 1] = share
        scores[node, 0] = score * calibrated(calibration, depth, longest, share)
    return n


@compiled
def widen(
    own_log: Int32Array,
    own_links: Int32Array,
    own_heads: Int32Array,
    own_blocks: Int32Array,
    memory_log: Int32Array,
    memory_links: Int32Array,
    memory_heads: Int32Array,
    memory_blocks: Int32Array,
    own: int,
    prompt: int,
    followed: Int64Array,
    features: Float32Table,
    candidates: Int32Array,
    trust: Float32Array,
    chain: Int32Array,
    path: Int32Array,
    n: int,
    depth: int,
    most: int,
    first: int,
    count: int,
) -> tuple[int, int]:
    """Adds to a node's candidates where its token occurs after something else than the path before it.

    Returns the new first candidate and the new count of candidates.
    """
    end = search_token(own_log, own_links, own_heads, own_blocks, path, n, -1, prompt, most, candidates, count)
    end = search_token(memory_log, memory_links, memory_heads, memory_blocks, path, n, own, -1, most, candidates, end)
    kept = count
    for found in range(count, end):
        in_memory = candidates[found, KIND] == MEMORY
        known = False
        j = first
        while j >= 0 and not known:
            known = candidates[j, AT] == candidates[found, AT] and (
                (candidates[j, KIND] % SUBSTITUTED == MEMORY) == in_memory
            )
            j = chain[j]
        if known:
            continue
        copy_candidate(candidates, found, candidates, kept)
        candidates[kept, LENGTH] -= depth
        candidates[kept, NEAR] = near_bin(candidates[kept, AT] - depth, followed[1 if in_memory else 0])
        candidates[kept, SHORTER] = 1
        trust[kept] = trust_of(candidates, kept, features)
        chain[kept] = first
        first = kept
        kept += 1
    return first, kept


@compiled
def learn(
    own_log: Int32Array,
    own_blocks: Int32Array,
    memory_log: Int32Array,
    memory_blocks: Int32Array,
    features: Float32Table,
    escapes: Float32Table,
    candidates: Int32Array,
    accepted: Int32Array,
    branch_length: int,
    followed: Int64Array,
    votes: Float32Array,
    tokens: Int32Array,
) -> None:
    """One gradient step of `features` and `escapes` for each accepted token that candidates voted on.

    `candidates`, int32[c, COLUMNS], are those at the root of the latest draft; they are moved. `followed` is set to
    the most trusted place of each index that came true, moved behind the accepted tokens.
    """
    alive = candidates.shape[0]
    own_best, memory_best = -1, -1
    own_reached, memory_reached = 0, 0
    for depth in range(min(accepted.shape[0], branch_length)):
        total = np.float32(0.0)
        right = np.float32(0.0)
        longest = 0
        own_heaviest = memory_heaviest = np.float32(0.0)
        kept = 0
        for j in range(alive):
            in_memory = candidates[j, KIND] % SUBSTITUTED == MEMORY
            log = memory_log if in_memory else own_log
            at = following(memory_blocks if in_memory else own_blocks, candidates[j, AT])
            if at < 0 or log[at] < 0:
                continue
            copy_candidate(candidates, j, candidates, kept)
            candidates[kept, AT] = at
            length = min(candidates[kept, LENGTH] + depth, LONGEST)
            longest = max(longest, length)
            votes[kept] = features[candidates[kept, KIND], length] * trust_of(candidates, kept, features)
            tokens[kept] = log[at]
            total += votes[kept]
            if log[at] == accepted[depth]:
                right += votes[kept]
                if in_memory and votes[kept] > memory_heaviest:
                    memory_heaviest, memory_best, memory_reached = votes[kept], at, depth + 1
                elif not in_memory and votes[kept] > own_heaviest:
                    own_heaviest, own_best, own_reached = votes[kept], at, depth + 1
            kept += 1
        alive = kept
        if alive == 0:
            break
        bin_ = log2_bin(alive, COUNT_BINS)
        total += escapes[longest, bin_]
        wrong = 1.0 if right == 0.0 else 0.0
        escapes[longest, bin_] *= 1.0 + _RATE * (wrong - escapes[longest, bin_] / total)
        kept = 0
        for j in range(alive):
            gradient = -votes[j] / total
            if tokens[j] == accepted[depth]:
                gradient += votes[j] / right
            _turn(features, candidates, j, min(candidates[j, LENGTH] + depth, LONGEST), 1.0 + _RATE * gradient)
            if tokens[j] == accepted[depth]:
                copy_candidate(candidates, j, candidates, kept)
                kept += 1
        alive = kept
        if alive == 0:
            break
    _follow(own_blocks, followed, 0, own_best, accepted.shape[0] - own_reached)
    _follow(memory_blocks, followed, 1, memory_best, accepted.shape[0] - memory_reached)


@compiled
def _turn(features: Float32Table, candidates: Int32Array, j: int, length: int, factor: float) -> None:
    kind = candidates[j, KIND]
    _scale(features, kind, length, factor)
    _scale(features, kind, AGREEING_AT + candidates[j, AGREEING], factor)
    _scale(features, kind, NEWER_AT + candidates[j, NEWER], factor)
    _scale(features, kind, NEAR_AT + candidates[j, NEAR], factor)
    _scale(features, kind, SHORTER_AT + candidates[j, SHORTER], factor)


@compiled
def _scale(features: Float32Table, kind: int, column: int, factor: float) -> None:
    features[kind, column] = min(max(features[kind, column] * factor, _LEAST), _GREATEST)


@compiled
def _follow(blocks: Int32Array, followed: Int64Array, side: int, best: int, behind: int) -> None:
    """Sets where one index is followed: `best`, if any came true, moved on by the `behind` tokens after it. What came
    true no more for 16 steps is given up."""
    if best >= 0:
        followed[side] = best
        followed[2 + side] = 0
    elif followed[side] >= 0:
        followed[2 + side] += 1
        if followed[2 + side] > 16:
            followed[side] = -1
    for _ in range(behind):
        if followed[side] >= 0:
            followed[side] = following(blocks, followed[side])


@compiled
def learn_calibration(
    calibration: Float32Table,
    tokens: Int32Array,
    parents: Int32Array,
    shares: Float32Array,
    longest: Int32Array,
    accepted: Int32Array,
) -> None:
    """Moves the rates of the nodes on the accepted path, and of their siblings, towards what happened."""
    node = -1
    for depth in range(accepted.shape[0]):
        taken = -1
        for i in range(node + 1, tokens.shape[0]):
            if parents[i] != node:
                continue
            hit = tokens[i] == accepted[depth]
            if hit:
                taken = i
            d, m, lower, w = calibration_cell(depth, longest[i], shares[i])
            error = (1.0 if hit else 0.0) - calibrated(calibration, depth, longest[i], shares[i])
            for cell, part in ((lower, 1.0 - w), (lower + 1, w)):
                value = calibration[d, m, cell] * (1.0 + _CALIBRATION_RATE * part * error)
                calibration[d, m, cell] = min(max(value, 0.05), 20.0)
        if taken < 0:
            break
        node = taken
