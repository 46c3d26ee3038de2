"""The weight of a candidate's vote, and where the weights start.

A vote's weight is a product: one factor for each (source, match length), (source, agreement behind), and so on. One
vote goes to "something else" (the escape of prediction by partial matching, PPM). How probable a token with a share of
the votes is, `chance` says.

Before any traffic, the logarithms of the weights are linear between a few points. They, and the odds, were learned
online on recorded outputs of seven kinds, the former on their first halves, and rounded; there is no command for it.

Knows nothing of where candidates come from, nor of how weights are learned.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np

from draftwood_strategies.arrays import Float32Array, Float64Array, Integer, Real
from draftwood_strategies.native import compiled, record_dtype
from draftwood_strategies.trie.phrase_index import mixed
from draftwood_strategies.trie.retrieval import (
    AGREEING_BINS,
    KINDS,
    LONGEST,
    NEWER_BINS,
    PROMPT,
    RECENT_BINS,
    Candidates,
)

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
    candidate = candidates[j]
    trust: Real = (
        features[candidate.kind, AGREEING_AT + candidate.agreeing]
        * features[candidate.kind, NEWER_AT + candidate.newer]
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


LENGTHS = LONGEST + 2
"""Bins of the longest match with a token in one source, 0 for none."""
SLOTS = 1 << 14
"""Of the hashed table, 64 kB. Sixteen times as many lessen the loss by 0.6 to 0.9%
(docs/decisions/trie-scores.md)."""
SCALE, BIAS = 0, 1
LENGTH_AT = 2
TOKENS_AT = LENGTH_AT + 3 * LENGTHS
ODDS = TOKENS_AT + SLOTS
"""Entries of the odds, float32[ODDS]: what the log-odds of the share are multiplied by, and what is added to them. Then
where biases begin: of the lengths in the own prompt, the own output and the memory, and the table; and the number of
all."""

_LEAST_SHARE, _GREATEST_SHARE = 1e-3, 0.9995
"""Bounds of a share."""
_RATE, _SCALE_RATE = 0.005, 0.0005
"""Steps of the biases and the scale."""
_TOKEN_RATE = 0.1
"""Step of the table. 0.2 and 0.4 change acceptance lengths by -0.1% and -0.5%."""
_GREATEST = 8.0
"""Bounds every entry."""


@compiled
def with_match(support: Integer, source: Integer, length: Integer) -> Integer:
    """What speaks for a token, 0 at first, and a match of so many tokens in one source, if it is the longest there.

    It is one number: for each source 5 bits of the longest match with 1 added.
    """
    shift = 5 * source
    more: Integer = max(length + 1 - (support >> shift & 31), 0)
    return support + (more << shift)


@compiled
def slots_of(token: Integer, last: Integer, before: Integer) -> tuple[Integer, Integer, Integer]:
    """Where the table has the biases of a token: alone, after one token and after two."""
    alone = mixed(np.int64(0), token)
    after_one = mixed(alone, last)
    after_two = mixed(after_one, before)
    mask = SLOTS - 1
    return TOKENS_AT + (alone & mask), TOKENS_AT + (after_one & mask), TOKENS_AT + (after_two & mask)


@compiled
def bins_of(support: Integer) -> tuple[Integer, Integer, Integer]:
    """Where the odds have the biases of a token's lengths."""
    return (
        LENGTH_AT + (support & 31),
        LENGTH_AT + LENGTHS + (support >> 5 & 31),
        LENGTH_AT + 2 * LENGTHS + (support >> 10),
    )


@compiled
def chance(odds: Float32Array, share: Real, support: Integer, token: Integer, last: Integer, before: Integer) -> Real:
    """The probability that `token` is accepted after `before` and `last`, if its parent is.

    Args:
        odds: float32[ODDS].
        share: its share of the votes.
        support: see `with_match`; never `NO_VOTES`.
    """
    alone, after_one, after_two = slots_of(token, last, before)
    prompt, output, memory = bins_of(support)
    logit: Real = odds[SCALE] * _stretched(share) + odds[BIAS]
    logit += odds[prompt] + odds[output] + odds[memory]
    logit += odds[alone] + odds[after_one] + odds[after_two]
    unit = np.float32(1.0)
    rate: Real = unit / (unit + math.exp(-logit))
    return rate


@compiled
def correct(
    odds: Float32Array,
    share: Real,
    support: Integer,
    token: Integer,
    last: Integer,
    before: Integer,
    accepted: bool,
) -> None:
    """One gradient step for a token whose parent was accepted; the other arguments are those of `chance`."""
    error = (1.0 if accepted else 0.0) - chance(odds, share, support, token, last, before)
    _step(odds, SCALE, _SCALE_RATE * error * _stretched(share))
    _step(odds, BIAS, _RATE * error)
    for at in bins_of(support):
        _step(odds, at, _RATE * error)
    for at in slots_of(token, last, before):
        _step(odds, at, _TOKEN_RATE * error)


@compiled
def _stretched(share: Real) -> Real:
    """Log-odds of a share."""
    bounded = min(max(share, np.float32(_LEAST_SHARE)), np.float32(_GREATEST_SHARE))
    return math.log(bounded / (np.float32(1.0) - bounded))


@compiled
def _step(odds: Float32Array, at: Integer, by: Real) -> None:
    odds[at] = min(max(odds[at] + by, -_GREATEST), _GREATEST)


NOVEL = record_dtype(token=np.int32, count=np.float32)
"""A token and how often it came, recent times counting more."""
Novel: TypeAlias = Annotated[Any, NOVEL]
"""NOVEL[COUNTED + 1], the highest count first; the last entry has the sum of all counts."""

NO_VOTES = -1
"""What speaks for a novel token, in place of what `with_match` returns: it has no odds, its share of the votes is
its probability. With odds acceptance lengths are the same within 0.4%, and a draft of 64 nodes takes 2.4 us longer."""

COUNTED = 256
"""How many tokens are counted at a time."""
_DECAY, _UNSEEN = 0.999, 20.0
"""What each miss leaves of all counts, and the count of tokens that are not counted. 0.995 and 0.9998 change acceptance
lengths by -0.2 and -0.0% (docs/decisions/trie-scores.md)."""


def no_novel() -> Novel:
    """Before any traffic."""
    novel = np.zeros(COUNTED + 1, NOVEL)
    novel["token"] = -1
    return novel


@compiled
def novel_chance(novel: Novel, rank: Integer) -> Real:
    """The probability of the token of this rank where the votes miss; 0 beyond the last one."""
    chance: Real = novel[rank].count / (novel[COUNTED].count + np.float32(_UNSEEN))
    return chance


@compiled
def count_miss(novel: Novel, token: Integer) -> None:
    """Counts a token that the votes missed. A new one takes the place of the least frequent one."""
    decay, total, at = np.float32(_DECAY), np.float32(1.0), COUNTED - 1
    for rank in range(COUNTED):
        novel[rank].count *= decay
        total += novel[rank].count
        if novel[rank].token == token:
            at = rank
    if novel[at].token != token:
        total -= novel[at].count
        novel[at].token = token
        novel[at].count = 0.0
    novel[COUNTED].count = total
    count = novel[at].count + np.float32(1.0)
    while at > 0 and novel[at - 1].count <= count:
        novel[at].token = novel[at - 1].token
        novel[at].count = novel[at - 1].count
        at -= 1
    novel[at].token = token
    novel[at].count = count
