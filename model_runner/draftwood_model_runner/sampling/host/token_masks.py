"""Applies packed masks of allowed tokens to rows of logits, of any size of the vocabulary, in one pass."""

from __future__ import annotations

import numpy as np

from draftwood_strategies.native import Float32Array, Int32Array, compiled


def forbid(packed: bytes, scores: Float32Array) -> None:
    """Sets the scores, float32[vocab], of tokens that are not allowed to -inf.

    Args:
        packed: bit b of byte n is of token 8 n + b, from the lowest bit on, 1 if it is allowed; ceil(vocab / 32) * 4
            bytes or more.
    """
    _forbid(np.frombuffer(packed, np.int32, -(-scores.shape[0] // 32)), scores)


@compiled
def _forbid(words: Int32Array, scores: Float32Array) -> None:
    whole = scores.shape[0] // 32
    for at in range(whole):
        word = words[at]
        if word != -1:
            for bit in range(32):  # of fixed length and without a branch: many at a time
                score = scores[32 * at + bit]
                scores[32 * at + bit] = score if word >> bit & 1 else np.float32(-np.inf)
    for token in range(32 * whole, scores.shape[0]):
        if not words[whole] >> (token - 32 * whole) & 1:
            scores[token] = np.float32(-np.inf)
