"""Online learning of the trie's weights from the accepted tokens, which are written into the indexes then.

Gradient ascent on the logarithm of the probability that the votes gave to the accepted token, one step a token, as the
mixing weights of PAQ compressors are learned; multiplicative updates keep the weights positive.
"""

from __future__ import annotations

from typing import NamedTuple

from draftwood_strategies.native import Float32Array, Int32Array, Int64Array, Integer, Real, compiled
from draftwood_strategies.trie.candidates import (
    AGREEING,
    KIND,
    NEAR,
    NEWER,
    POSITION,
    SHORTER,
    copy_candidate,
    in_memory,
    log2_bin,
    recent_bin,
)
from draftwood_strategies.trie.odds import correct
from draftwood_strategies.trie.phrase_index import NOWHERE, IndexArrays, append, following, preceding
from draftwood_strategies.trie.retrieval import UNKNOWN
from draftwood_strategies.trie.weights import (
    AGREEING_AT,
    COUNT_BINS,
    NEAR_AT,
    NEWER_AT,
    RECENT_AT,
    SHORTER_AT,
    Weights,
    length_at,
    trust_of,
    weight_of,
)
from draftwood_strategies.trie.workspace import TrieDraft

_RATE = 0.02
"""Step of features and escapes. Half of it changes acceptance lengths by -0.2%, twice by +0.2% (docs/decisions, "The
trie's constants are flat")."""
_LEAST, _GREATEST = 1e-4, 1e5
"""Bounds of every factor of a vote. Not tuned."""
_PATIENCE = 16
"""Steps until a followed position is given up. 4 and 64 change acceptance lengths by less than 0.1%."""


class WritableIndex(NamedTuple):
    """A phrase index and a sequence that is written into it.

    Attributes:
        arrays: the index's, with space for the tokens.
        ring: int64[3], see `PhraseIndex.ring`.
        writer: int64[2], see `PhraseIndex.writer`.
    """

    arrays: IndexArrays
    ring: Int64Array
    writer: Int64Array


class Votes(NamedTuple):
    """Workspace: the votes of c candidates or more at one depth.

    Attributes:
        weights: float32[c], the weight of each vote.
        tokens, recent: int32[c], the token voted for and the bin of how recently the sequence had it.
    """

    weights: Float32Array
    tokens: Int32Array
    recent: Int32Array


@compiled
def learn(
    own: WritableIndex,
    memory: WritableIndex,
    remember: bool,
    weights: Weights,
    followed: Int64Array,
    candidates: Int32Array,
    draft: TrieDraft,
    accepted: Int32Array,
    branch_length: int,
    votes: Votes,
) -> None:
    """Learns from a draft, then writes the accepted tokens into the own index, and with `remember` into the memory.

    Args:
        followed: int64[4], the position that the sequence follows in its own index and in the memory (-1 for none), and
            for both how many steps ago it predicted the right token; updated.
        candidates: int32[c, COLUMNS], those at the root of the draft; they are moved.
        draft: the latest one.
        accepted: int32[a], the tokens that the step wrote.
        votes: for c candidates.
    """
    _learn_votes(
        own.arrays, memory.arrays, weights, own.writer[0], followed, candidates, accepted, branch_length, votes
    )
    _learn_odds(own.arrays, own.writer[0], weights.odds, draft, accepted)
    append(own.arrays, own.ring, own.writer, accepted)
    if remember:
        append(memory.arrays, memory.ring, memory.writer, accepted)


@compiled
def _learn_votes(
    own: IndexArrays,
    memory: IndexArrays,
    weights: Weights,
    own_at: Integer,
    followed: Int64Array,
    candidates: Int32Array,
    accepted: Int32Array,
    branch_length: int,
    votes: Votes,
) -> None:
    """One gradient step of features and escapes for each accepted token that candidates voted on.

    Args:
        own_at: the sequence's last position in its own index, before the accepted tokens.
        followed: int64[4], set to the heaviest position of each index that predicted an accepted token, moved on to the
            last accepted one, and how many steps ago that was.
    """
    features, escapes = weights.features, weights.escapes
    alive = candidates.shape[0]
    own_best: Integer = -1
    memory_best: Integer = -1
    own_reached, memory_reached = 0, 0
    for depth in range(min(accepted.shape[0], branch_length)):
        alive, longest, total = _advance(own, memory, features, own_at, candidates, alive, depth, votes)
        if alive == 0:
            break
        right: Real = 0.0
        own_heaviest: Real = 0.0
        memory_heaviest: Real = 0.0
        for j in range(alive):
            if votes.tokens[j] != accepted[depth]:
                continue
            vote = votes.weights[j]
            right += vote
            if in_memory(candidates, j):
                if vote > memory_heaviest:
                    memory_heaviest, memory_best, memory_reached = vote, candidates[j, POSITION], depth + 1
            elif vote > own_heaviest:
                own_heaviest, own_best, own_reached = vote, candidates[j, POSITION], depth + 1
        few = log2_bin(alive, COUNT_BINS)
        total += escapes[longest, few]
        escapes[longest, few] *= 1.0 + _RATE * ((1.0 if right == 0.0 else 0.0) - escapes[longest, few] / total)
        alive = _correct(features, candidates, alive, depth, votes, accepted[depth], right, total)
        if alive == 0:
            break
    _follow(own, followed, 0, own_best, accepted.shape[0] - own_reached)
    _follow(memory, followed, 1, memory_best, accepted.shape[0] - memory_reached)


@compiled
def _advance(
    own: IndexArrays,
    memory: IndexArrays,
    features: Float32Array,
    own_at: Integer,
    candidates: Int32Array,
    alive: int,
    depth: int,
    votes: Votes,
) -> tuple[int, Integer, Real]:
    """Moves the candidates on by one token and takes their votes; those at their end are dropped.

    Returns how many are left, the longest match among them, and the sum of the votes.
    """
    total: Real = 0.0
    longest: Integer = 0
    kept = 0
    for j in range(alive):
        index = memory if in_memory(candidates, j) else own
        at = following(index, candidates[j, POSITION])
        if at < 0 or index.log[at] < 0:
            continue
        copy_candidate(candidates, j, candidates, kept)
        candidates[kept, POSITION] = at
        votes.tokens[kept] = index.log[at]
        votes.recent[kept] = recent_bin(own, own_at, votes.tokens[kept])
        trust = trust_of(candidates, kept, features)
        votes.weights[kept] = weight_of(candidates, kept, trust, depth, votes.recent[kept], features)
        longest = max(longest, length_at(candidates, kept, depth))
        total += votes.weights[kept]
        kept += 1
    return kept, longest, total


@compiled
def _correct(
    features: Float32Array,
    candidates: Int32Array,
    alive: int,
    depth: int,
    votes: Votes,
    token: Integer,
    right: Real,
    total: Real,
) -> int:
    """The gradient step for one token; keeps the candidates that predicted it and returns how many they are."""
    kept = 0
    for j in range(alive):
        gradient = -votes.weights[j] / total
        if votes.tokens[j] == token:
            gradient += votes.weights[j] / right
        factor = 1.0 + _RATE * gradient
        kind = candidates[j, KIND]
        _scale(features, kind, length_at(candidates, j, depth), factor)
        _scale(features, kind, AGREEING_AT + candidates[j, AGREEING], factor)
        _scale(features, kind, NEWER_AT + candidates[j, NEWER], factor)
        _scale(features, kind, NEAR_AT + candidates[j, NEAR], factor)
        _scale(features, kind, SHORTER_AT + candidates[j, SHORTER], factor)
        _scale(features, kind, RECENT_AT + votes.recent[j], factor)
        if votes.tokens[j] == token:
            copy_candidate(candidates, j, candidates, kept)
            kept += 1
    return kept


@compiled
def _scale(features: Float32Array, kind: Integer, column: Integer, factor: Real) -> None:
    features[kind, column] = min(max(features[kind, column] * factor, _LEAST), _GREATEST)


@compiled
def _follow(index: IndexArrays, followed: Int64Array, side: int, best: Integer, behind: int) -> None:
    """Sets the position that is followed in one index: `best`, if any, moved on by the `behind` tokens after it. A
    position that predicted no accepted token for `_PATIENCE` steps is given up."""
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
def _learn_odds(own: IndexArrays, own_at: Integer, odds: Float32Array, draft: TrieDraft, accepted: Int32Array) -> None:
    """One gradient step for each node on the accepted path, and for their siblings."""
    before: Integer = preceding(own, own_at) if own_at >= 0 else NOWHERE
    before = own.log[before] if before >= 0 else UNKNOWN
    last: Integer = own.log[own_at] if own_at >= 0 else UNKNOWN
    node = -1
    for depth in range(accepted.shape[0]):
        taken = -1
        for i in range(node + 1, draft.tokens.shape[0]):
            if draft.parents[i] != node:
                continue
            token = draft.tokens[i]
            hit = token == accepted[depth]
            if hit:
                taken = i
            correct(odds, draft.shares[i], draft.supports[i], depth, token, last, before, hit)
        if taken < 0:
            break
        node, before, last = taken, last, accepted[depth]
