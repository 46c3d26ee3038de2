"""The weight of a candidate's vote, and where the weights start.

A vote's weight is a product: one factor for each (source, match length), (source, agreement behind), and so on. One
vote goes to "something else" (the escape of prediction by partial matching, PPM). How probable a token with a share of
the votes is, `odds` says.

Before any traffic, the logarithms of the weights are linear between a few points. They, and the odds, were learned
online on recorded outputs of seven kinds, the former on their first halves, and rounded; there is no command for it.

Knows nothing of where candidates come from, nor of how weights are learned.
"""

from __future__ import annotations

import itertools
from typing import Annotated, NamedTuple

import numpy as np

from draftwood_strategies.native import Float32Array, Float64Array, Integer, Real, compiled
from draftwood_strategies.trie.candidates import (
    AGREEING_BINS,
    KINDS,
    LONGEST,
    NEWER_BINS,
    PROMPT,
    RECENT_BINS,
    Candidates,
)
from draftwood_strategies.trie.learned.novel import Novel, no_novel
from draftwood_strategies.trie.learned.odds import ODDS, TOKENS_AT

AGREEING_AT = LONGEST + 1
NEWER_AT = AGREEING_AT + AGREEING_BINS
RECENT_AT = NEWER_AT + NEWER_BINS
FEATURES = RECENT_AT + RECENT_BINS
"""Columns of the features, after those of the match length; `FEATURES` is their number."""


class Weights(NamedTuple):
    """The weights that were learned from a tenant's traffic.

    Attributes:
        features: float32[KINDS, FEATURES], the factors of a vote.
        escapes: float32[LONGEST + 1], the weight of "something else" by the longest match.
        odds: float32[ODDS], what turns a share of the votes into a probability.
        novel: NOVEL[COUNTED + 1], the tokens that came where no candidate had them.
    """

    features: Annotated[Float32Array, 2]
    escapes: Float32Array
    odds: Float32Array
    novel: Novel


_LENGTH_POINTS = (0, 1, 2, 4, 8, 12, 16)
_AGREEING_POINTS = (0, 4, 12)
_NEWER_POINTS = (0, 3, 6)

# One line for each kind: own prompt, own output, memory.
_LENGTH = (
    (-0.8, 2.9, 3.6, 4.3, 5.6, 6.4, 7.0),
    (0.2, 3.5, 3.9, 3.9, 5.0, 6.4, 6.7),
    (-0.4, 2.1, 3.2, 3.6, 4.9, 6.0, 6.4),
)
_AGREEING = (
    (-1.0, -0.7, 0.0),
    (-1.2, -0.7, -0.1),
    (-1.4, -0.4, 0.4),
)
_NEWER = (
    (0.0, -1.0, -1.5),
    (-0.4, -1.2, -1.3),
    (0.6, -0.3, -1.2),
)
# How long ago the sequence had the predicted token: never; within 4, 16, 64, 256, 1024 tokens; longer.
_RECENT = (
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    (-0.1, 0.0, 0.1, 0.1, -0.1, -0.1, 0.0),
    (-1.2, 0.3, 0.5, 0.5, 0.1, 0.1, 0.0),
)

_ESCAPE_POINTS = (0, 1, 2, 5, 10, 16)
_ESCAPE = (2.3, 2.5, 2.1, 2.3, 3.0, 2.8)

# Log-odds of acceptance: scale and bias of the share; by the longest match in the own prompt, the own output and the
# memory, none at first.
_SHARE = (0.95, 0.25)
_MATCH = (
    (-0.35, -0.5, -0.3, 0.0, 0.25, 0.35, 0.25, 0.2, 0.15, 0.15, 0.05, 0.05, 0.05, 0.05, 0.0, 0.0, 0.0, 0.0),
    (-0.25, -0.25, -0.2, 0.1, 0.2, 0.15, 0.2, 0.1, 0.05, 0.1, 0.0, 0.0, 0.0, 0.0, -0.05, 0.0, -0.05, -0.05),
    (-0.15, -0.35, -0.25, -0.1, 0.15, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1, 0.0, 0.0, -0.05, -0.1, 0.0, 0.0, -0.1),
)


def prior_weights(prompt_weight: float) -> Weights:
    """New weights; votes of the own prompt are multiplied by `prompt_weight`."""
    features = np.zeros((KINDS, FEATURES))
    for kind in range(KINDS):
        row = features[kind]
        row[:AGREEING_AT] = _line(_LENGTH_POINTS, _LENGTH[kind], AGREEING_AT)
        row[AGREEING_AT:NEWER_AT] = _line(_AGREEING_POINTS, _AGREEING[kind], NEWER_AT - AGREEING_AT)
        row[NEWER_AT:RECENT_AT] = _line(_NEWER_POINTS, _NEWER[kind], RECENT_AT - NEWER_AT)
        row[RECENT_AT:] = _RECENT[kind]
    features[PROMPT, :AGREEING_AT] += np.log(prompt_weight)
    escapes = _line(_ESCAPE_POINTS, _ESCAPE, LONGEST + 1)
    odds = np.zeros(ODDS, np.float32)
    odds[:TOKENS_AT] = [*_SHARE, *itertools.chain(*_MATCH)]
    return Weights(np.exp(features).astype(np.float32), np.exp(escapes).astype(np.float32), odds, no_novel())


def _line(points: tuple[int, ...], values: tuple[float, ...], length: int) -> Float64Array:
    return np.interp(np.arange(length), points, values)


@compiled
def trust_of(candidates: Candidates, j: Integer, features: Float32Array) -> Real:
    """The factors of candidate j's vote that are the same along a path and for every token."""
    one = candidates[j]
    trust: Real = features[one.kind, AGREEING_AT + one.agreeing] * features[one.kind, NEWER_AT + one.newer]
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
