"""Which tokens top-p and min-p keep, in integers: the same on every machine, whoever chooses the token.

The rule is that of transformers' `TopPLogitsWarper` and `MinPLogitsWarper`: tokens in the order of their scores, of
equal scores in the order of their ids; top-p leaves out the first of them, as many as have at most the probability
1 - p together. transformers' sort leaves open which of several equal scores comes first, and so which of them is kept;
how many it keeps is the same here. Its sums of float32 depend on the order of summation, so a token at the very edge
may fall on either side there. `cuda.kernels.choosing` computes the same bits.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from draftwood_strategies.draft import Float32Array
from draftwood_strategies.native import Integer

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

BoolArray = npt.NDArray[np.bool_]


def dropped_share(top_p: float) -> float:
    """The share of all weights that the tokens that top-p leaves out may have together."""
    return (1.0 - top_p) * (1.0 + _ROUNDING)


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


def kept_by_top_p(scores: Float32Array, top_p: float) -> BoolArray:
    """bool[vocab]: see above; at least one token."""
    kept = np.empty(scores.shape[0], np.bool_)
    _keep_greatest(scores.view(np.int32), token_weights(scores), dropped_share(top_p), kept)
    return kept


def kept_by_min_p(scores: Float32Array, min_p: float) -> BoolArray:
    """bool[vocab]: tokens that are at least `min_p` times as probable as the most probable one."""
    return np.asarray(token_weights(scores) >= least_weight(min_p))


@numba.njit(cache=True, nogil=True)
def _fill_weights(scores: Float32Array, highest: np.float32, weights: Float32Array) -> None:
    for token in range(scores.shape[0]):
        distance = highest - scores[token]
        weights[token] = 0.0
        if distance < FARTHEST:
            binary = np.int64(distance * np.float32(1 << DISTANCE_BITS)) * LOG2_E
            whole = binary >> (DISTANCE_BITS + UNIT_BITS)
            part = (binary >> DISTANCE_BITS) & ((1 << UNIT_BITS) - 1)
            power = np.int64(EXP2[6])
            for i in range(5, -1, -1):
                power = EXP2[i] - ((power * part) >> UNIT_BITS)
            if whole <= WEIGHT_BITS:
                weights[token] = np.float32((power << (WEIGHT_BITS - UNIT_BITS)) >> whole)


@numba.njit(cache=True, nogil=True)
def _keep_greatest(bits: npt.NDArray[np.int32], weights: Float32Array, share: float, kept: BoolArray) -> None:
    """Finds the key at the edge, 16 bits at a time, then how many of the tokens with this key are kept."""
    upper, lower, counts = np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64)
    total = np.int64(0)
    for token in range(bits.shape[0]):
        weight = np.int64(weights[token])
        total += weight
        upper[_key(bits[token]) >> 16] += weight
    wanted = total - np.int64(total * share)
    wanted = wanted if wanted > 1 else np.int64(1)
    above, first = np.int64(0), (1 << 16) - 1
    while first > 0 and above + upper[first] < wanted:
        above += upper[first]
        first -= 1
    for token in range(bits.shape[0]):
        key = _key(bits[token])
        if key >> 16 == first:
            lower[key & 0xFFFF] += np.int64(weights[token])
            counts[key & 0xFFFF] += 1
    second = (1 << 16) - 1
    while second > 0 and above + lower[second] < wanted:
        above += lower[second]
        second -= 1
    edge, ties, weight = (first << 16) + second, counts[second], np.int64(1)
    if ties and lower[second] > ties:
        weight = lower[second] // ties
    dropped = ties - (wanted - above + weight - 1) // weight
    for token in range(bits.shape[0]):
        key = _key(bits[token])
        kept[token] = key > edge
        if key == edge:
            kept[token] = dropped <= 0
            dropped -= 1


@numba.njit(cache=True, nogil=True, inline="always")
def _key(bits: Integer) -> Integer:
    """A float32's bits as an integer in [0, 2^32) that orders as floats do, for both zeros the same."""
    if bits == -2147483648:
        bits = 0
    ordered: Integer = np.int64(bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 2147483648
    return ordered
