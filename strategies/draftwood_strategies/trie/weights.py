"""The weight of a candidate's vote.

A vote's weight is a product: one factor for each (source, match length), (source, agreement behind), and so on. One
vote goes to "something else" (the escape of prediction by partial matching, PPM). How probable a token with a share of
the votes is, `odds` says.

Knows nothing of where candidates come from, nor of how weights are learned.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from draftwood_strategies.native import Float32Array, Integer, Real, compiled
from draftwood_strategies.trie.candidates import (
    AGREEING_BINS,
    LONGEST,
    NEAR_BINS,
    NEWER_BINS,
    RECENT_BINS,
    SHORTER_BINS,
    Candidates,
)

AGREEING_AT = LONGEST + 1
NEWER_AT = AGREEING_AT + AGREEING_BINS
NEAR_AT = NEWER_AT + NEWER_BINS
SHORTER_AT = NEAR_AT + NEAR_BINS
RECENT_AT = SHORTER_AT + SHORTER_BINS
FEATURES = RECENT_AT + RECENT_BINS
"""Columns of the features, after those of the match length; `FEATURES` is their number."""

COUNT_BINS = 6
"""Bins of the number of votes."""


class Weights(NamedTuple):
    """The weights that were learned from a tenant's traffic.

    Attributes:
        features: float32[KINDS, FEATURES], the factors of a vote.
        escapes: float32[LONGEST + 1, COUNT_BINS], the weight of "something else", by the longest match and the
            number of votes.
        odds: float32[ODDS], what turns a share of the votes into a probability.
    """

    features: Annotated[Float32Array, 2]
    escapes: Annotated[Float32Array, 2]
    odds: Float32Array


@compiled
def trust_of(candidates: Candidates, j: Integer, features: Float32Array) -> Real:
    """The factors of candidate j's vote that are the same along a path and for every token."""
    one = candidates[j]
    trust: Real = (
        features[one.kind, AGREEING_AT + one.agreeing]
        * features[one.kind, NEWER_AT + one.newer]
        * features[one.kind, NEAR_AT + one.near]
        * features[one.kind, SHORTER_AT + one.shorter]
    )
    return trust


@compiled
def weight_of(
    candidates: Candidates, j: Integer, trust: Real, depth: Integer, recent: Integer, features: Float32Array
) -> Real:
    """The weight of candidate j's vote at `depth` for a token in the bin `recent` of `recent_bin`."""
    kind = candidates[j].kind
    weight: Real = features[kind, length_at(candidates, j, depth)] * trust * features[kind, RECENT_AT + recent]
    return weight


@compiled
def length_at(candidates: Candidates, j: Integer, depth: Integer) -> Integer:
    """How long candidate j's match is at `depth`, the path included."""
    length: Integer = min(candidates[j].length + depth, LONGEST)
    return length
