"""Which tokens top-k, top-p and min-p keep, in integers: the same on every machine, whoever chooses the token.

The rule is that of transformers' `TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper`: top-k keeps all tokens
whose scores are at least the k-th greatest. Of these, in the order of their scores, of equal scores in the order of
their ids, top-p leaves out the first, as many as have at most the probability 1 - p together. transformers' sort leaves
open which of several equal scores comes first, and so which of them is kept; how many it keeps is the same here. Its
sums of float32 depend on the order of summation, so a token at the very edge may fall on either side there.

`find_edge` finds where the kept tokens end, without a sort. Scores are compared by keys, integers that order as floats
do. Tokens lie in blocks, whose greatest keys are found first: blocks below the edge are never looked at again. For
top-p alone, a histogram tells in which bin the edge is, so that few tokens are gathered. The edge among gathered ones
is found as in quickselect. `cuda.kernels.sampling` computes the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from draftwood_strategies.arrays import Float32Array, Float64Array, Int32Array, Int64Array, Integer, Real
from draftwood_strategies.native import compiled

WEIGHT_BITS = 34
"""The most probable token weighs 2^34: a sum over 2^18 tokens is an integer that float64 holds."""
FARTHEST = 25.0
"""Tokens whose score is this much below the largest weigh nothing."""
DISTANCE_BITS, UNIT_BITS = 26, 30
"""Fractional bits of distances between scores, and of numbers in [0, 1]."""
LOG2_E = 1549082005
"""log2(e), with `UNIT_BITS` fractional bits."""
EXP2 = (1073741824, 744261013, 257939199, 59583778, 10287439, 1370293, 117533)
"""Coefficients of a polynomial for 2^-x in [0, 1], of alternating signs, the first positive: right within 5e-9."""
_ROUNDING = 2.0**-24
"""Sums that differ from 1 - p by this share count as equal to it, as in float32: 0.1 in a distribution of tens."""
_DISTANCE_UNIT = np.float32(1 << DISTANCE_BITS)
_LOW = 0xFFFFFFFF
"""Tells the compiler that factors have 32 bits: it multiplies many at a time then."""

BLOCK = 64
LEAST_KEY = -(1 << 31)
"""At most any float's key."""
_BINS = 2048
_BINS_PER_UNIT = np.float32((_BINS - 1) / FARTHEST)
_TOKEN_BITS, _TOKEN = 32, 0xFFFFFFFF
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_FAR = np.float32(FARTHEST)


def dropped_share(top_p: float) -> float:
    """The share of all weights that the tokens that top-p leaves out may have together; negative if it keeps all."""
    return (1.0 - top_p) * (1.0 + _ROUNDING) if top_p < 1.0 else -1.0


def least_weight(min_p: float) -> float:
    """The weight that min-p asks for; a float32."""
    return float(np.float32(min_p)) * 2.0**WEIGHT_BITS


def token_weights(scores: Float32Array) -> Float32Array:
    """float32[vocab], integers: the probability of each token over that of the most probable one, times 2^34.

    Args:
        scores: float32[vocab], log-probabilities up to a constant.
    """
    weights = np.empty(scores.shape[0], np.float32)
    _fill_weights(scores, np.max(scores), weights)
    return weights


@numba.njit(cache=True, nogil=True)
def _fill_weights(scores: Float32Array, highest: np.float32, weights: Float32Array) -> None:
    for token in range(scores.shape[0]):
        distance = highest - scores[token]
        weights[token] = weight_at(distance) if distance < FARTHEST else np.float32(0.0)


@numba.njit(nogil=True, inline="always")
def weight_at(distance: Any) -> Any:
    """In compiled code: the weight, a float32, of a token whose score is `distance` below the largest.

    Args:
        distance: float32 in [0, FARTHEST).
    """
    binary = np.int64(np.int32(distance * _DISTANCE_UNIT)) * LOG2_E
    whole = binary >> (DISTANCE_BITS + UNIT_BITS)
    part = (binary >> DISTANCE_BITS) & ((1 << UNIT_BITS) - 1)
    power = np.int64(EXP2[6])
    power = EXP2[5] - (((power & _LOW) * part) >> UNIT_BITS)
    power = EXP2[4] - (((power & _LOW) * part) >> UNIT_BITS)
    power = EXP2[3] - (((power & _LOW) * part) >> UNIT_BITS)
    power = EXP2[2] - (((power & _LOW) * part) >> UNIT_BITS)
    power = EXP2[1] - (((power & _LOW) * part) >> UNIT_BITS)
    power = EXP2[0] - (((power & _LOW) * part) >> UNIT_BITS)
    return np.float32((power << (WEIGHT_BITS - UNIT_BITS)) >> whole)


class Workspace(NamedTuple):
    """What a search for the edge needs, to be used by one thread at a time.

    Attributes:
        greatest: int32[blocks], the greatest key in each block, before the scores are divided by the temperature.
        masses: float64[bins + BLOCK], integers.
        weights, bins: float32[BLOCK], int32[BLOCK].
        entries: int64[vocab], gathered tokens, each the key above the token, so that they order as keys do,
            and of equal keys as their tokens.
    """

    greatest: Int32Array
    masses: Float64Array
    weights: Float32Array
    bins: Int32Array
    entries: Int64Array

    @classmethod
    def of(cls, vocab: int) -> Workspace:
        return cls(
            np.empty(-(-vocab // BLOCK), np.int32),
            np.empty(_BINS + BLOCK, np.float64),
            np.empty(BLOCK, np.float32),
            np.empty(BLOCK, np.int32),
            np.empty(vocab, np.int64),
        )


@intrinsic
def _divide(typing_context: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fdiv(*arguments)

    return types.float32(types.float32, types.float32), generate


apply_temperature: Any = cast(Any, _divide)
"""In compiled code: a score over the temperature, both float32. A division that raises an error for a divisor of 0, as
Python's, is done one by one."""


@numba.njit(nogil=True, inline="always")
def key_of_bits(bits: Any) -> Any:
    """In compiled code: a float32's bits as an integer that orders as floats do: the magnitude of negative ones
    inverted."""
    return bits ^ ((bits >> _SIGN) & _MAGNITUDE)


@intrinsic
def _bits(typing_context: Any, a: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@intrinsic
def _float(typing_context: Any, a: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


_bits_of: Any = cast(Any, _bits)
float_of_bits: Any = cast(Any, _float)
"""In compiled code: the float32 that an int32 has the bits of."""


@numba.njit(nogil=True, inline="always")
def key_of(score: Any) -> Any:
    """In compiled code: the key of a float32, for both zeros the same."""
    return key_of_bits(_bits_of(score + np.float32(0.0)))


@numba.njit(nogil=True, inline="always")
def score_of(key: Any) -> Any:
    """In compiled code: the score that has this key."""
    return float_of_bits(key_of_bits(key))


@compiled
def find_greatest(bits: Int32Array, greatest: Int32Array) -> int:
    """Sets greatest[block] to the greatest key in it; returns the greatest of all.

    Args:
        bits: int32[vocab], of the scores.
    """
    vocab, highest = bits.shape[0], np.int32(LEAST_KEY)
    for block in range(greatest.shape[0]):
        first, highest_here = block * BLOCK, np.int32(LEAST_KEY)
        if first + BLOCK <= vocab:
            for i in range(BLOCK):  # of fixed length: many at a time
                highest_here = max(highest_here, key_of_bits(bits[first + i]))
        else:
            for token in range(first, vocab):
                highest_here = max(highest_here, key_of_bits(bits[token]))
        greatest[block] = highest_here
        highest = max(highest, highest_here)
    return int(highest)


@compiled
def find_edge(
    scores: Float32Array, temperature: Real, top_k: Integer, share: Real, work: Workspace, edge: Int64Array
) -> None:
    """Sets edge to the key of the least score that is kept, and the first token of this score that is.

    Args:
        scores: float32[vocab], finite or -inf.
        temperature: float32.
        top_k: 0 keeps all.
        share: that top-p leaves out, see `dropped_share`; negative if it is not asked for.
        work: for which `find_greatest` was called.
        edge: int64[2].
    """
    edge[0], edge[1] = LEAST_KEY, 0
    blocks, vocab = work.greatest.shape[0], scores.shape[0]
    highest = np.int32(LEAST_KEY)
    for block in range(blocks):
        highest = max(highest, work.greatest[block])
    max_score = apply_temperature(score_of(highest), temperature)
    if 0 < top_k < vocab:
        floor = np.int32(LEAST_KEY)
        if top_k < blocks:  # that many blocks have a token at least as great
            for block in range(blocks):
                work.entries[block] = _entry(work.greatest[block], block)
            floor = _key(_edge_among(work.entries[:blocks], top_k, False, max_score))
            floor = key_of(apply_temperature(score_of(floor), temperature))
        n = _gather(scores, temperature, floor, work)
        edge[0] = _key(_edge_among(work.entries[:n], top_k, False, max_score))
        if share >= 0.0:
            kept, total = 0, np.int64(0)
            for i in range(n):
                if _key(work.entries[i]) >= edge[0]:
                    work.entries[kept] = work.entries[i]
                    total += _weight(work.entries[i], max_score)
                    kept += 1
            last = _edge_among(work.entries[:kept], _wanted(total, share), True, max_score)
            edge[0], edge[1] = _key(last), last & _TOKEN
    elif share >= 0.0:
        n, wanted = _gather_bin(scores, temperature, max_score, share, work)
        last = _edge_among(work.entries[:n], wanted, True, max_score)
        edge[0], edge[1] = _key(last), last & _TOKEN


@numba.njit(nogil=True, inline="always")
def _entry(key: Any, token: Any) -> Any:
    return (np.int64(key) << _TOKEN_BITS) | np.int64(token)


@numba.njit(nogil=True, inline="always")
def _key(entry: Any) -> Any:
    return np.int32(entry >> _TOKEN_BITS)


@numba.njit(nogil=True, inline="always")
def _wanted(total: Any, share: Any) -> Any:
    """What the tokens that top-p keeps weigh at least."""
    return max(np.int64(total) - np.int64(total * share), np.int64(1))


@numba.njit(nogil=True, inline="always")
def _weight(entry: Any, max_score: Any) -> Any:
    distance = max_score - score_of(_key(entry))
    return np.int64(weight_at(distance)) if distance < _FAR else np.int64(0)


@compiled
def _gather(scores: Float32Array, temperature: Real, floor: Integer, work: Workspace) -> int:
    """Gathers the tokens with keys, over the temperature, of at least `floor`; returns how many."""
    n = 0
    for block in range(work.greatest.shape[0]):
        if key_of(apply_temperature(score_of(work.greatest[block]), temperature)) < floor:
            continue
        for token in range(block * BLOCK, min(scores.shape[0], (block + 1) * BLOCK)):
            key = key_of(apply_temperature(scores[token], temperature))
            if key >= floor:
                work.entries[n] = _entry(key, token)
                n += 1
    return n


@compiled
def _gather_bin(
    scores: Float32Array, temperature: Real, max_score: Real, share: Real, work: Workspace
) -> tuple[int, int]:
    """Weighs all tokens, and gathers those near the edge of top-p; returns how many, and what the kept ones of them
    weigh at least."""
    masses = work.masses
    _weigh(scores, temperature, max_score, work)
    total = np.int64(0)
    for i in range(_BINS):
        total += np.int64(masses[i])
    wanted, at = _wanted(total, share), 0
    while at < _BINS - 1 and np.int64(masses[at]) < wanted:
        wanted -= np.int64(masses[at])
        at += 1
    n = 0
    for block in range(work.greatest.shape[0]):
        first, end = block * BLOCK, min(scores.shape[0], (block + 1) * BLOCK)
        if _bin(max_score - apply_temperature(score_of(work.greatest[block]), temperature)) > at:
            continue
        if end - first == BLOCK:
            any_near = np.int32(0)
            for i in range(BLOCK):  # many at a time
                any_near |= np.int32(_bin(max_score - apply_temperature(scores[first + i], temperature)) == at)
            if not any_near:
                continue
        for token in range(first, end):
            score = apply_temperature(scores[token], temperature)
            if _bin(max_score - score) == at:
                work.entries[n] = _entry(key_of(score), token)
                n += 1
    return n, wanted


@numba.njit(nogil=True, inline="always")
def _bin(distance: Any) -> Any:
    """The bin of a distance from the largest score; `_BINS` for what weighs nothing."""
    near = distance < _FAR
    distance = distance if near else np.float32(0.0)
    return np.int32(distance * _BINS_PER_UNIT) if near else np.int32(_BINS)


@compiled
def _weigh(scores: Float32Array, temperature: Real, max_score: Real, work: Workspace) -> None:
    """Sets the masses of the bins to the weights of their tokens."""
    weights, bins, masses, vocab = work.weights, work.bins, work.masses, scores.shape[0]
    masses[:] = 0.0
    for block in range(vocab // BLOCK):
        first = block * BLOCK
        if not max_score - apply_temperature(score_of(work.greatest[block]), temperature) < _FAR:
            continue
        for i in range(BLOCK):  # many at a time
            distance = max_score - apply_temperature(scores[first + i], temperature)
            near = distance < _FAR
            distance = distance if near else np.float32(0.0)
            weight = weight_at(distance)
            weights[i] = weight if near else np.float32(0.0)
            # Those that weigh nothing have a bin each: an addition waits for the one before it to the same bin.
            bins[i] = np.int32(distance * _BINS_PER_UNIT) if near else np.int32(_BINS + i)
        for i in range(BLOCK):
            masses[bins[i]] += weights[i]
    for token in range(vocab // BLOCK * BLOCK, vocab):
        distance = max_score - apply_temperature(scores[token], temperature)
        if distance < _FAR:
            masses[_bin(distance)] += weight_at(distance)


@compiled
def _edge_among(entries: Int64Array, wanted: Integer, weighed: bool, max_score: Real) -> int:
    """The greatest entry such that those that are as great are as many as `wanted`, or weigh as much.

    Args:
        entries: int64[n], all different; reordered.
        wanted: at least 1, at most what all of them count.
    """
    first, end = 0, entries.shape[0]
    while end - first > 1:
        middle = (first + end) // 2
        pivot, entries[middle] = entries[middle], entries[first]
        entries[first], at, greater = pivot, first + 1, np.int64(0)
        for i in range(first + 1, end):
            entry = entries[i]
            if entry > pivot:
                entries[i], entries[at] = entries[at], entry
                at += 1
                greater += _weight(entry, max_score) if weighed else np.int64(1)
        with_pivot = greater + (_weight(pivot, max_score) if weighed else np.int64(1))
        if wanted <= greater:
            first, end = first + 1, at
        elif wanted <= with_pivot:
            return int(pivot)
        else:
            first, wanted = at, wanted - with_pivot
    return int(entries[first])
