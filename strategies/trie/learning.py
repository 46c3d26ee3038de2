"""What came true teaches the weights of the next drafts, and is written into the indexes.

Gradient ascent on the logarithm of the probability that the votes gave to the token that came, one step a token, as
the mixing weights of PAQ compressors are learned; multiplicative updates keep the weights positive.

Knows nothing of trees but the parents of their nodes.
"""

from __future__ import annotations

from strategies.draft import Float32Array, Int32Array
from strategies.native import Int64Array, Integer, Real, compiled
from strategies.trie.phrase_index import View, append, following
from strategies.trie.retrieval import (
    AGREEING,
    AT,
    KIND,
    NEAR,
    NEWER,
    SHORTER,
    copy_candidate,
    in_memory,
    log2_bin,
    recent_bin,
)
from strategies.trie.weights import (
    AGREEING_AT,
    COUNT_BINS,
    NEAR_AT,
    NEWER_AT,
    RECENT_AT,
    SHORTER_AT,
    Float32Table,
    calibrated,
    calibration_cell,
    length_at,
    trust_of,
    weight_of,
)

_RATE = 0.02
_LEAST, _GREATEST = 1e-4, 1e5
_CALIBRATION_RATE = 0.01
_CALIBRATION_LEAST, _CALIBRATION_GREATEST = 0.05, 20.0
_PATIENCE = 16


@compiled
def learn(
    own_log: Int32Array,
    own_links: Int32Array,
    own_heads: Int32Array,
    own_blocks: Int32Array,
    own_ring: Int64Array,
    own_writer: Int64Array,
    memory_log: Int32Array,
    memory_links: Int32Array,
    memory_heads: Int32Array,
    memory_blocks: Int32Array,
    memory_ring: Int64Array,
    memory_writer: Int64Array,
    remember: bool,
    features: Float32Table,
    escapes: Float32Table,
    calibration: Float32Table,
    followed: Int64Array,
    candidates: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    shares: Float32Array,
    longest: Int32Array,
    accepted: Int32Array,
    branch_length: int,
    votes: Float32Array,
    predicted: Int32Array,
    recent: Int32Array,
) -> None:
    """Learns from a draft, then writes what was accepted into the own index, and into the memory if it `remember`s it.

    All in one call: taking arrays over from Python costs as much as the work.

    Args:
        own_log to memory_writer: the arrays of two indexes with room for the accepted tokens, and what writes there.
        features to calibration: `Weights`.
        followed: int64[4], see `_learn_votes`.
        candidates: int32[c, COLUMNS], those at the root of the latest draft; they are moved.
        tokens, parents, shares, longest: [n], that draft: its tree, and what `calibrated` took for each node.
        votes, predicted, recent: [c or more], room.
    """
    own = View(own_log, own_links, own_heads, own_blocks)
    memory = View(memory_log, memory_links, memory_heads, memory_blocks)
    _learn_votes(
        own, memory, features, escapes, own_writer[0], followed, candidates, accepted, branch_length, votes, predicted,
        recent,
    )  # fmt: skip
    _learn_calibration(calibration, tokens, parents, shares, longest, accepted)
    append(own_log, own_links, own_heads, own_blocks, own_ring, own_writer, accepted)
    if remember:
        append(memory_log, memory_links, memory_heads, memory_blocks, memory_ring, memory_writer, accepted)


@compiled
def _learn_votes(
    own: View,
    memory: View,
    features: Float32Table,
    escapes: Float32Table,
    own_at: Integer,
    followed: Int64Array,
    candidates: Int32Array,
    accepted: Int32Array,
    branch_length: int,
    votes: Float32Array,
    tokens: Int32Array,
    recent: Int32Array,
) -> None:
    """One gradient step of `features` and `escapes` for each accepted token that candidates voted on.

    Args:
        own_at: the sequence's last position in its own index, before the accepted tokens.
        followed: int64[4], set to the weightiest place of each index that came true, moved on to the last accepted
            token, and how many steps ago that was.
        candidates: int32[c, COLUMNS], those at the root of the latest draft; they are moved.
        votes, tokens, recent: [c or more], room.
    """
    alive = candidates.shape[0]
    own_best: Integer = -1
    memory_best: Integer = -1
    own_reached, memory_reached = 0, 0
    for depth in range(min(accepted.shape[0], branch_length)):
        alive, longest, total = _advance(own, memory, features, own_at, candidates, alive, depth, votes, tokens, recent)
        if alive == 0:
            break
        right: Real = 0.0
        own_heaviest: Real = 0.0
        memory_heaviest: Real = 0.0
        for j in range(alive):
            if tokens[j] != accepted[depth]:
                continue
            right += votes[j]
            if in_memory(candidates, j):
                if votes[j] > memory_heaviest:
                    memory_heaviest, memory_best, memory_reached = votes[j], candidates[j, AT], depth + 1
            elif votes[j] > own_heaviest:
                own_heaviest, own_best, own_reached = votes[j], candidates[j, AT], depth + 1
        few = log2_bin(alive, COUNT_BINS)
        total += escapes[longest, few]
        escapes[longest, few] *= 1.0 + _RATE * ((1.0 if right == 0.0 else 0.0) - escapes[longest, few] / total)
        alive = _correct(features, candidates, alive, depth, votes, tokens, recent, accepted[depth], right, total)
        if alive == 0:
            break
    _follow(own, followed, 0, own_best, accepted.shape[0] - own_reached)
    _follow(memory, followed, 1, memory_best, accepted.shape[0] - memory_reached)


@compiled
def _advance(
    own: View,
    memory: View,
    features: Float32Table,
    own_at: Integer,
    candidates: Int32Array,
    alive: int,
    depth: int,
    votes: Float32Array,
    tokens: Int32Array,
    recent: Int32Array,
) -> tuple[int, Integer, Real]:
    """Moves the candidates on by one token and takes their votes; those at their end are dropped.

    Returns how many are left, the longest match among them, and the sum of the votes.
    """
    total: Real = 0.0
    longest: Integer = 0
    kept = 0
    for j in range(alive):
        index = memory if in_memory(candidates, j) else own
        at = following(index, candidates[j, AT])
        if at < 0 or index.log[at] < 0:
            continue
        copy_candidate(candidates, j, candidates, kept)
        candidates[kept, AT] = at
        tokens[kept] = index.log[at]
        recent[kept] = recent_bin(own, own_at, tokens[kept])
        trust = trust_of(candidates, kept, features)
        votes[kept] = weight_of(candidates, kept, trust, depth, recent[kept], features)
        longest = max(longest, length_at(candidates, kept, depth))
        total += votes[kept]
        kept += 1
    return kept, longest, total


@compiled
def _correct(
    features: Float32Table,
    candidates: Int32Array,
    alive: int,
    depth: int,
    votes: Float32Array,
    tokens: Int32Array,
    recent: Int32Array,
    token: Integer,
    right: Real,
    total: Real,
) -> int:
    """The gradient step for one token; keeps the candidates that predicted it and returns how many they are."""
    kept = 0
    for j in range(alive):
        gradient = -votes[j] / total
        if tokens[j] == token:
            gradient += votes[j] / right
        factor = 1.0 + _RATE * gradient
        kind = candidates[j, KIND]
        _scale(features, kind, length_at(candidates, j, depth), factor)
        _scale(features, kind, AGREEING_AT + candidates[j, AGREEING], factor)
        _scale(features, kind, NEWER_AT + candidates[j, NEWER], factor)
        _scale(features, kind, NEAR_AT + candidates[j, NEAR], factor)
        _scale(features, kind, SHORTER_AT + candidates[j, SHORTER], factor)
        _scale(features, kind, RECENT_AT + recent[j], factor)
        if tokens[j] == token:
            copy_candidate(candidates, j, candidates, kept)
            kept += 1
    return kept


@compiled
def _scale(features: Float32Table, kind: Integer, column: Integer, factor: Real) -> None:
    features[kind, column] = min(max(features[kind, column] * factor, _LEAST), _GREATEST)


@compiled
def _follow(index: View, followed: Int64Array, side: int, best: Integer, behind: int) -> None:
    """Sets where one index is followed: `best`, if any came true, moved on by the `behind` tokens after it. What came
    true no more for some steps is given up."""
    if best >= 0:
        followed[side] = best
        followed[2 + side] = 0
    elif followed[side] >= 0:
        followed[2 + side] += 1
        if followed[2 + side] > _PATIENCE:
            followed[side] = -1
    for _ in range(behind):
        if followed[side] >= 0:
            followed[side] = following(index, followed[side])


@compiled
def _learn_calibration(
    calibration: Float32Table,
    tokens: Int32Array,
    parents: Int32Array,
    shares: Float32Array,
    longest: Int32Array,
    accepted: Int32Array,
) -> None:
    """Moves the rates of the nodes on the accepted path, and of their siblings, towards what happened.

    Args:
        tokens, parents: int32[n], a draft tree.
        shares, longest: [n], what `calibrated` took for each node.
    """
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
                calibration[d, m, cell] = min(max(value, _CALIBRATION_LEAST), _CALIBRATION_GREATEST)
        if taken < 0:
            break
        node = taken
