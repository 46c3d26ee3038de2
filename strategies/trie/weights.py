"""How much a candidate's vote weighs, and how shares of votes become probabilities.

A vote weighs what its features say: a weight for each (source, match length), (source, agreement behind), and so on,
multiplied. The probability of a token is its share of all votes, of which one goes to "something else" (the escape
of prediction by partial matching, PPM). A last table, linear between neighbouring shares, turns shares into
acceptance rates (the adaptive probability maps of PAQ compressors), so that the scores of a tree add up to the tokens
that it will bring.

Knows nothing of where candidates come from, nor of how weights are learned.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.draft import Int32Array
from strategies.native import Integer, Real, compiled
from strategies.trie.retrieval import (
    AGREEING,
    AGREEING_BINS,
    KIND,
    LENGTH,
    LONGEST,
    NEAR,
    NEAR_BINS,
    NEWER,
    NEWER_BINS,
    RECENT_BINS,
    SHORTER,
    SHORTER_BINS,
)

Float32Table: TypeAlias = npt.NDArray[np.float32]

AGREEING_AT = LONGEST + 1
NEWER_AT = AGREEING_AT + AGREEING_BINS
NEAR_AT = NEWER_AT + NEWER_BINS
SHORTER_AT = NEAR_AT + NEAR_BINS
RECENT_AT = SHORTER_AT + SHORTER_BINS
FEATURES = RECENT_AT + RECENT_BINS
COUNT_BINS = 6
DEPTH_BINS, LENGTH_BINS, SHARE_BINS = 4, 9, 16


class Weights(NamedTuple):
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


@compiled
def trust_of(candidates: Int32Array, j: Integer, features: Float32Table) -> Real:
    """The part of candidate j's vote that stays the same along a path and for whatever token."""
    kind = candidates[j, KIND]
    trust: Real = (
        features[kind, AGREEING_AT + candidates[j, AGREEING]]
        * features[kind, NEWER_AT + candidates[j, NEWER]]
        * features[kind, NEAR_AT + candidates[j, NEAR]]
        * features[kind, SHORTER_AT + candidates[j, SHORTER]]
    )
    return trust


@compiled
def weight_of(
    candidates: Int32Array, j: Integer, trust: Real, depth: Integer, recent: Integer, features: Float32Table
) -> Real:
    """Candidate j's vote at `depth` for a token that was `recent`."""
    kind = candidates[j, KIND]
    weight: Real = features[kind, length_at(candidates, j, depth)] * trust * features[kind, RECENT_AT + recent]
    return weight


@compiled
def length_at(candidates: Int32Array, j: Integer, depth: Integer) -> Integer:
    """How long candidate j's match is at `depth`, the path included."""
    length: Integer = min(candidates[j, LENGTH] + depth, LONGEST)
    return length


@compiled
def calibration_cell(depth: Integer, longest: Integer, share: Real) -> tuple[Integer, Integer, Integer, Real]:
    """Indices of the lower of two neighbouring cells, and the weight of the upper."""
    place = share * SHARE_BINS - 0.5
    lower = max(0, min(SHARE_BINS - 2, int(place)))
    upper_weight = min(1.0, max(0.0, place - lower))
    return min(depth, DEPTH_BINS - 1), min(longest, LENGTH_BINS - 1), lower, upper_weight


@compiled
def calibrated(calibration: Float32Table, depth: Integer, longest: Integer, share: Real) -> Real:
    """The acceptance rate of a token with this share of the votes."""
    d, m, lower, w = calibration_cell(depth, longest, share)
    factor = calibration[d, m, lower] * (1.0 - w) + calibration[d, m, lower + 1] * w
    rate: Real = min(1.0, share * factor)
    return rate
