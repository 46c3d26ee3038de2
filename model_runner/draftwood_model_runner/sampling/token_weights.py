"""Which tokens top-k, top-p and min-p keep, in integers: the same on every machine, whoever chooses the token.

The rule is that of transformers' `TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper`: top-k keeps all tokens
whose scores are at least the k-th greatest. Of these, in the order of their scores, of equal scores in the order of
their ids, top-p leaves out the first, as many as have at most the probability 1 - p together. transformers' sort leaves
open which of several equal scores comes first, and so which of them is kept; how many it keeps is the same here. Its
sums of float32 depend on the order of summation, so a token at the very edge may fall on either side there.

The host finds the tokens in `sampling.draws`, and `cuda.kernels.sampling` computes the same bits.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from draftwood_strategies.draft import Float32Array

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
