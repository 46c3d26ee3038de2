"""The weights of a mixture of sources: the features that they belong to, and where they start.

Knows nothing of trees and tables.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import numpy as np

from draftwood_strategies.native import Float32Array, Real, compiled
from draftwood_strategies.successors import ORDERS, STEADY_BINS, WIDTH

SOURCES = 4
"""How many tree-shaped sources can be mixed."""

TABLE = SOURCES
"""The number of the successor table among the sources."""

LEVELS, CHANCE_BINS = 4, 8
LEAST_CHANCE = 1e-4
"""Bounds the logarithm of a source's probability."""
_LEAST_LEFT = 0.02
"""Bounds the logarithm of what a source leaves to other tokens."""

# The prior: fitted on GSM8K and support prompts, the 20 measured ones among them, and rounded to 0.05.
# `tools/fit_source_weights.py` prints these constants for other prompts; those for HumanEval, MT-Bench and the demo's
# warm-up questions made acceptance lengths 1 to 4% shorter (docs/decisions, "Hybrid's prior carries over").
_BEST_ROW = (1.8, 1.15, 0.65, 0.35, 0.05, -0.15, -0.35, -0.5)
_OTHER_ROWS = (0.95, 0.5, 0.3, 0.15, 0.0, -0.05, -0.15, -0.2)
_FIRST_OF_OTHER_ROWS = (0.95, 0.95, 0.8, 0.6)
_BEST_PER_STEADY_BIN, _OTHER_PER_STEADY_BIN = (0.3, 0.2, 0.15, 0.05), (0.15, 0.1, 0.05, 0.05)
_ESCAPES = ((0.5, 1.9, 1.7, 1.0, 1.0), (0.7, 1.2, 1.1, 0.65, 0.7), (0.5, 0.5, 0.65, 0.7, 1.0), (0.5,) * 5)
_TRUST, _BIAS = (0.0, 0.4, 0.7, 1.25), (0.0, 1.0, 1.1, 0.3)


class Weights(NamedTuple):
    """What was learned of the sources from a tenant's traffic.

    A source's confidence level at a node is a bin of the probability of its best token there, 0 where it has none; the
    level of the node is the highest of its tree-shaped sources.

    Attributes:
        ranks: float32[LEVELS, ORDERS + 1, ORDERS, STEADY_BINS, WIDTH], by the node's level, longest known context,
            context, steadiness of its row, rank.
        escapes: float32[LEVELS, ORDERS + 1], the logit of the escape by the node's level and longest known
            context.
        trust: float32[SOURCES, LEVELS], factors of the logarithm of a source's probability, by its own level.
        bias: float32[SOURCES, LEVELS, CHANCE_BINS], what is added to it, by its own level and that probability.
        seen: float32[LEVELS, ORDERS + 1], tokens learned from, by the node's level and longest known context.
    """

    ranks: Annotated[Float32Array, 5]
    escapes: Annotated[Float32Array, 2]
    trust: Annotated[Float32Array, 2]
    bias: Annotated[Float32Array, 3]
    seen: Annotated[Float32Array, 2]


def prior_weights() -> Weights:
    """Weights before any traffic."""
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
        seen=np.zeros((LEVELS, ORDERS + 1), np.float32),
    )


@compiled
def level_of(best: Real) -> int:
    """The confidence level of a source with this probability for its best token; 0 for one without a token."""
    return 0 if best <= 0.0 else 1 if best < 0.3 else 2 if best < 0.8 else 3


@compiled
def chance_bin(chance: Real) -> int:
    """The bin of a probability; bins are of even width in the logit."""
    return min(CHANCE_BINS - 1, max(0, int(math.log(chance / (1.0 + 1e-6 - chance)) + 4.0)))


@compiled
def left_over(left: Real) -> Real:
    """The logarithm of the probability that a source leaves to tokens which it does not have."""
    return math.log(max(left, _LEAST_LEFT))
