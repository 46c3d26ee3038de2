"""The weight of a candidate's vote.

A vote's weight is a product: one factor for each (source, match length), (source, agreement behind), and so on. One
vote goes to "something else" (the escape of prediction by partial matching, PPM). How probable a token with a share of
the votes is, `odds` says.

Knows nothing of where candidates come from, nor of how weights are learned.
"""

from __future__ import annotations

from typing import NamedTuple

from draftwood_strategies.native import Float32Array, Int32Array, Integer, Real, compiled
from draftwood_strategies.trie.candidates import (
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

AGREEING_AT = LONGEST + 1
NEWER_AT = AGREEING_AT + AGREEING_BINS
NEAR_AT = NEWER_AT + NEWER_BINS
SHORTER_AT = NEAR_AT + NEAR_BINS
RECENT_AT = SHORTER_AT + SHORTER_BINS
FEATURES = RECENT_AT + RECENT_BINS
"""Columns of the features, after those of the match length; `FEATURES` is their number."""

COUNT_BINS = 6
"""Bins of the number of votes. Not tuned."""


class Weights(NamedTuple):
    """The weights that were learned from a tenant's traffic.

    Attributes:
        features: float32[KINDS, FEATURES], the factors of a vote.
        escapes: float32[LONGEST + 1, COUNT_BINS], the weight of "something else", by the longest match and the
            number of votes.
        odds: float32[ODDS], what turns a share of the votes into a probability.
    """

    features: Float32Array
    escapes: Float32Array
    odds: Float32Array


@compiled
def trust_of(candidates: Int32Array, j: Integer, features: Float32Array) -> Real:
    """The factors of candidate j's vote that are the same along a path and for every token."""
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
    candidates: Int32Array, j: Integer, trust: Real, depth: Integer, recent: Integer, features: Float32Array
) -> Real:
    """The weight of candidate j's vote at `depth` for a token in the bin `recent` of `recent_bin`."""
    kind = candidates[j, KIND]
    weight: Real = features[kind, length_at(candidates, j, depth)] * trust * features[kind, RECENT_AT + recent]
    return weight


@compiled
def length_at(candidates: Int32Array, j: Integer, depth: Integer) -> Integer:
    """How long candidate j's match is at `depth`, the path included."""
    length: Integer = min(candidates[j, LENGTH] + depth, LONGEST)
    return length
