"""What each source's word is worth: from raw scores and ranks to the probability that a token comes next.

At a node of a draft every candidate token gets a logit, the sum of what the sources say of it, and the probabilities
are their softmax; candidate 0 is "none of these". A tree-shaped source says the logarithm of its own conditional
probability, scaled and shifted by how sure it is (what it leaves over, for tokens that it does not hold); the
successor table says a weight by rank, length of context and steadiness. This is the logistic mixing of PAQ
compressors, whose weights are chosen by a small context and learned online, for many symbols at once: the gradient of
the logarithm of the probability of the token that came. As the model is fitted to what comes true, its probabilities
need no further calibration.

Knows nothing of trees and tables.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.draft import Float32Array, Int32Array
from strategies.mixing.successors import ORDERS, STEADY_BINS, WIDTH
from strategies.native import Integer, Real, compiled

SOURCES = 4
"""How many tree-shaped sources can be mixed."""

TABLE = SOURCES
"""The number of the successor table among the sources."""

LOGIT = SOURCES + 1
"""The column of a candidate's logit, after what the sources say."""

LEVELS, CHANCE_BINS = 4, 8
LEAST_CHANCE = 1e-4
_LEAST_LEFT = 0.02

TOKEN, ADVISED, RANKS = 0, 1, 2
"""Columns of a candidate: its token, its node in the advice (-1 for none), and its rank in the row of each order
(`WIDTH` where the row does not hold it)."""

NONE_OF_THESE = -1
"""The token of candidate 0."""

_RATE, _TRUST_RATE = 0.03, 0.003
_FIRST_RATE, _FIRST_TOKENS = 5.0, 40.0
"""The first tokens teach so many times as much, and half of what is more after so many: weights that were fitted to
other text find to a tenant's own soon."""
_GREATEST = 8.0
_BEST_ROW = (1.8, 1.15, 0.65, 0.35, 0.05, -0.15, -0.35, -0.5)
_OTHER_ROWS = (0.95, 0.5, 0.3, 0.15, 0.0, -0.05, -0.15, -0.2)
_FIRST_OF_OTHER_ROWS = (0.95, 0.95, 0.8, 0.6)
_BEST_PER_STEADY_BIN, _OTHER_PER_STEADY_BIN = (0.3, 0.2, 0.15, 0.05), (0.15, 0.1, 0.05, 0.05)
_ESCAPES = ((0.5, 1.9, 1.7, 1.0, 1.0), (0.7, 1.2, 1.1, 0.65, 0.7), (0.5, 0.5, 0.65, 0.7, 1.0), (0.5,) * 5)
_TRUST, _BIAS = (0.0, 0.4, 0.7, 1.25), (0.0, 1.0, 1.1, 0.3)
_FIRST_GAIN = 0.2

Float64Array: TypeAlias = npt.NDArray[np.float64]
Float64Table: TypeAlias = npt.NDArray[np.float64]
Float32Table: TypeAlias = npt.NDArray[np.float32]


class Weights(NamedTuple):
    """What a tenant's traffic taught about the sources. A level says how sure the surest tree-shaped source is at a
    node: 0 where none says anything.

    Attributes:
        ranks: float32[LEVELS, ORDERS + 1, ORDERS, STEADY_BINS, WIDTH], by level, longest known context, context,
            steadiness of its row, rank.
        escapes: float32[LEVELS, ORDERS + 1], the logit of "none of these" by level and longest known context.
        trust: float32[SOURCES, LEVELS], factors of the logarithm of a source's probability, by its own level.
        bias: float32[SOURCES, LEVELS, CHANCE_BINS], what is added to it, by its own level and that probability.
        gains: float32[SOURCES + 1], by how much each source, the table last, raised the probability of the token that
            came, on average over the tokens written; see `gains`.
        seen: float32[LEVELS, ORDERS + 1], tokens learned from, by level and longest known context.
    """

    ranks: npt.NDArray[np.float32]
    escapes: npt.NDArray[np.float32]
    trust: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    gains: Float32Array
    seen: npt.NDArray[np.float32]


def prior_weights() -> Weights:
    """Weights before any traffic: what drafting for a small model taught, on school mathematics and customer
    support, rounded and smoothed."""
    ranks = np.zeros((LEVELS, ORDERS + 1, ORDERS, STEADY_BINS, WIDTH), np.float32)
    steady = np.arange(STEADY_BINS)
    for longest in range(1, ORDERS + 1):
        ranks[:, longest, : longest - 1] = _OTHER_ROWS
        ranks[:, longest, longest - 1] = _BEST_ROW
        for level in range(LEVELS):
            ranks[level, longest, : longest - 1, :, 0] = (
                _FIRST_OF_OTHER_ROWS[level] + _OTHER_PER_STEADY_BIN[level] * steady
            )
            ranks[level, longest, longest - 1, :, 0] += _BEST_PER_STEADY_BIN[level] * steady
    return Weights(
        ranks=ranks,
        escapes=np.array(_ESCAPES, np.float32),
        trust=np.tile(np.array(_TRUST, np.float32), (SOURCES, 1)),
        bias=np.tile(np.array(_BIAS, np.float32)[:, None], (SOURCES, 1, CHANCE_BINS)),
        gains=np.full(SOURCES + 1, _FIRST_GAIN, np.float32),
        seen=np.zeros((LEVELS, ORDERS + 1), np.float32),
    )


@compiled
def level_of(best: Real) -> int:
    """How sure a source is that gives its best token this probability; 0 for one that has no token."""
    return 0 if best <= 0.0 else 1 if best < 0.3 else 2 if best < 0.8 else 3


@compiled
def chance_bin(chance: Real) -> int:
    """Bins of even width in the logit."""
    return min(CHANCE_BINS - 1, max(0, int(math.log(chance / (1.0 + 1e-6 - chance)) + 4.0)))


@compiled
def left_over(left: Real) -> Real:
    """The logarithm of the probability that a source leaves to tokens which it does not hold."""
    return math.log(max(left, _LEAST_LEFT))


@compiled
def to_probabilities(said: Float64Table, n: int, probabilities: Float64Array) -> None:
    """Sets the first n of `probabilities` to the softmax of the candidates' logits.

    Args:
        said: float64[c, LOGIT + 1], what each source and the table say of each candidate, and the logit.
    """
    top = -1e30
    for i in range(n):
        probabilities[i] = said[i, LOGIT]
        top = max(top, probabilities[i])
    total = 0.0
    for i in range(n):
        probabilities[i] = math.exp(probabilities[i] - top)
        total += probabilities[i]
    for i in range(n):
        probabilities[i] /= total


@compiled
def correct(
    weights: Weights,
    candidates: Int32Array,
    probabilities: Float64Array,
    n: int,
    came: int,
    longest: int,
    level: int,
    levels: Int32Array,
    steadiness: Int32Array,
    chances: Float32Table,
    left: Float64Array,
) -> None:
    """One gradient step at a node where candidate `came` turned out right.

    Args:
        longest, level: the node's longest known context, and how sure its surest source is.
        levels, left: int32[SOURCES] and float64[SOURCES], how sure each source is, and the logarithm of what it
            leaves over.
        steadiness: int32[ORDERS], of the row of each context; -1 where it is not known.
        chances: float32[m, SOURCES], each source's conditional probability at each node of the advice.
    """
    seen = weights.seen[level, longest]
    weights.seen[level, longest] = seen + 1.0
    rate = _RATE * (1.0 + (_FIRST_RATE - 1.0) / (1.0 + seen / _FIRST_TOKENS))
    for i in range(n):
        gradient = (1.0 if i == came else 0.0) - probabilities[i]
        if i == 0:
            _step(weights.escapes[level], longest, rate * gradient)
        for order in range(longest):
            rank = candidates[i, RANKS + order]
            if rank < WIDTH:
                _step(weights.ranks[level, longest, order, steadiness[order]], rank, rate * gradient)
        for source in range(SOURCES):
            if levels[source] == 0:
                continue
            node = candidates[i, ADVISED]
            chance: Real = chances[node, source] if node >= 0 else 0.0
            if chance > 0.0:
                _step(weights.bias[source, levels[source]], chance_bin(chance), rate * gradient)
                _step(weights.trust[source], levels[source], _TRUST_RATE * gradient * math.log(chance))
            else:
                _step(weights.trust[source], levels[source], _TRUST_RATE * gradient * left[source])


@compiled
def _step(row: Float32Array, at: Integer, by: Real) -> None:
    row[at] = min(_GREATEST, max(-_GREATEST, row[at] + by))
