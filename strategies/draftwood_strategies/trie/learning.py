"""Online learning of the trie's weights from the accepted tokens, which are written into the indexes then.

Gradient ascent on the logarithm of the probability that the votes gave to the accepted token, one step a token, as the
mixing weights of PAQ compressors are learned; multiplicative updates keep the weights positive.
"""

from __future__ import annotations

from typing import NamedTuple

from draftwood_strategies.arrays import Float32Array, Int32Array, Int64Array, Integer, Real
from draftwood_strategies.native import arrays_at, compiled, copy_record
from draftwood_strategies.trie.arrays import SequenceArrays, TrieWorkspace
from draftwood_strategies.trie.phrase_index import NOWHERE, IndexArrays, append, following, lacks_space, preceding
from draftwood_strategies.trie.retrieval import (
    MEMORY_SIDE,
    OWN_SIDE,
    UNKNOWN,
    Candidates,
    in_memory,
    recent_bin,
    side_of,
)
from draftwood_strategies.trie.weights import (
    AGREEING_AT,
    NEWER_AT,
    NO_VOTES,
    RECENT_AT,
    Weights,
    correct,
    count_miss,
    length_at,
    trust_of,
    weight_of,
)

_RATE = 0.02
"""Step of features and escapes. Half of it changes acceptance lengths by -0.2%, twice by +0.2%
(docs/decisions/trie-scores.md)."""
_LEAST, _GREATEST = 1e-4, 1e5
"""Bounds of every factor of a vote."""


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
def learn_all(
    sequences: Int64Array,
    first: int,
    accepted: Int32Array,
    offsets: Int32Array,
    memory_address: Integer,
    workspace_address: Integer,
    branch_length: int,
) -> int:
    """For each sequence from `first` on, learns from its latest draft, and writes what it wrote into its own index and
    the memory.

    Args:
        sequences: as in `draft_all`; 0 for a sequence that has none yet.
        accepted, offsets: as in `BatchStrategy.observe_all`.
        memory_address, workspace_address: as in `draft_all`.

    Returns:
        The sequence that has no arrays, or for which an index must grow first; s after the last one.
    """
    memory, workspace = arrays_at(IndexArrays, memory_address), arrays_at(TrieWorkspace, workspace_address)
    votes = Votes(workspace.trust, workspace.chain, workspace.table)
    for s in range(first, sequences.shape[0]):
        if sequences[s] == 0:
            return s
        sequence = arrays_at(SequenceArrays, sequences[s])
        state, written = sequence.state[0], accepted[offsets[s] : offsets[s + 1]]
        n = written.shape[0]
        if lacks_space(sequence.text, n, 1) or (state.remembered and lacks_space(memory, n + 1, 2)):
            return s
        learn(sequence, memory, arrays_at(Weights, state.weights), written, branch_length, votes)
        append(sequence.text, sequence.writer[0], written)
        if state.remembered:
            append(memory, sequence.memory_writer[0], written)
        state.drafted = state.roots = 0
        state.written += n
    return int(sequences.shape[0])


@compiled
def learn(
    sequence: SequenceArrays,
    memory: IndexArrays,
    weights: Weights,
    accepted: Int32Array,
    branch_length: int,
    votes: Votes,
) -> None:
    """Learns from a sequence's latest draft, whose roots are moved.

    Args:
        accepted: int32[a], the tokens that the step wrote, which are not in the sequence's index yet.
        votes: for as many candidates as there are roots.
    """
    _learn_votes(sequence, memory, weights, accepted, branch_length, votes)
    _learn_odds(sequence, weights.odds, accepted)


@compiled
def _learn_votes(
    sequence: SequenceArrays,
    memory: IndexArrays,
    weights: Weights,
    accepted: Int32Array,
    branch_length: int,
    votes: Votes,
) -> None:
    """One gradient step of features and escapes for each accepted token that candidates voted on.

    The positions that the sequence follows move on by the accepted tokens, each from the first candidate that predicted
    one of them.
    """
    index, followed, candidates = sequence.text, sequence.followed, sequence.roots[: sequence.state[0].roots]
    features, escapes = weights.features, weights.escapes
    alive, voting = candidates.shape[0], True
    for depth in range(accepted.shape[0]):
        _move_on(index, followed, OWN_SIDE)
        _move_on(memory, followed, MEMORY_SIDE)
        if not voting or depth >= branch_length:
            continue
        alive, longest, total = _advance(sequence, memory, features, candidates, alive, depth, votes)
        if alive > 0:
            right: Real = 0.0
            for j in range(alive - 1, -1, -1):
                if votes.tokens[j] == accepted[depth]:
                    right += votes.weights[j]
                    followed[side_of(candidates, j)] = candidates[j].position
            total += escapes[longest]
            escapes[longest] *= 1.0 + _RATE * ((1.0 if right == 0.0 else 0.0) - escapes[longest] / total)
            alive = _correct(features, candidates, alive, depth, votes, accepted[depth], right, total)
        if alive == 0:
            count_miss(weights.novel, accepted[depth])
            voting = False


@compiled
def _move_on(index: IndexArrays, followed: Int64Array, side: int) -> None:
    """Moves the position that is followed in one index on by one token."""
    if followed[side] >= 0:
        followed[side] = following(index, followed[side])


@compiled
def _advance(
    sequence: SequenceArrays,
    memory: IndexArrays,
    features: Float32Array,
    candidates: Candidates,
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
        index = memory if in_memory(candidates, j) else sequence.text
        at = following(index, candidates[j].position)
        if at < 0 or index.log[at] < 0:
            continue
        copy_record(candidates[kept], candidates[j])
        candidates[kept].position = at
        votes.tokens[kept] = index.log[at]
        votes.recent[kept] = recent_bin(sequence.text, sequence.writer[0].at, votes.tokens[kept])
        trust = trust_of(candidates, kept, features)
        votes.weights[kept] = weight_of(candidates, kept, trust, depth, votes.recent[kept], features)
        longest = max(longest, length_at(candidates, kept, depth))
        total += votes.weights[kept]
        kept += 1
    return kept, longest, total


@compiled
def _correct(
    features: Float32Array,
    candidates: Candidates,
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
        candidate, kind = candidates[j], candidates[j].kind
        _scale(features, kind, length_at(candidates, j, depth), factor)
        _scale(features, kind, AGREEING_AT + candidate.agreeing, factor)
        _scale(features, kind, NEWER_AT + candidate.newer, factor)
        _scale(features, kind, RECENT_AT + votes.recent[j], factor)
        if votes.tokens[j] == token:
            copy_record(candidates[kept], candidate)
            kept += 1
    return kept


@compiled
def _scale(features: Float32Array, kind: Integer, column: Integer, factor: Real) -> None:
    features[kind, column] = min(max(features[kind, column] * factor, _LEAST), _GREATEST)


@compiled
def _learn_odds(sequence: SequenceArrays, odds: Float32Array, accepted: Int32Array) -> None:
    """One gradient step for each of the drafted nodes on the accepted path, and for their siblings."""
    index, at, draft, drafted = sequence.text, sequence.writer[0].at, sequence.draft, sequence.state[0].drafted
    before: Integer = preceding(index, at) if at >= 0 else NOWHERE
    before = index.log[before] if before >= 0 else UNKNOWN
    last: Integer = index.log[at] if at >= 0 else UNKNOWN
    node = -1
    for depth in range(accepted.shape[0]):
        taken = -1
        for i in range(node + 1, drafted):
            if draft.parents[i] != node:
                continue
            token = draft.tokens[i]
            hit = token == accepted[depth]
            if hit:
                taken = i
            if draft.supports[i] != NO_VOTES:
                correct(odds, draft.shares[i], draft.supports[i], token, last, before, hit)
        if taken < 0:
            break
        node, before, last = taken, last, accepted[depth]
