"""The probability that a token is accepted: a logistic regression of its share of the votes and of what speaks for it.

The votes know how often contexts of a length are right, but nothing of the tokens themselves: names and numbers differ
where words repeat. So the token, alone and with the one and the two before it, has a bias of its own in a hashed table,
as in the secondary estimation of PAQ compressors. Everything is learned online from the nodes whose parents are
accepted, so that the scores of a tree add up to its accepted tokens.

Knows nothing of where votes come from.
"""

from __future__ import annotations

import math

import numpy as np

from draftwood_strategies.native import Float32Array, Integer, Real, compiled
from draftwood_strategies.trie.candidates import LONGEST
from draftwood_strategies.trie.phrase_index import mixed

LENGTHS = LONGEST + 2
"""Bins of the longest match with a token in one source, 0 for none."""
SLOTS = 1 << 14
"""Of the hashed table, 64 kB. Sixteen times as many lessen the loss by 0.6 to 0.9% (docs/decisions, "Scores know the
tokens")."""
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
        support: see `with_match`; never `novel.NO_VOTES`.
    """
    alone, after_one, after_two = slots_of(token, last, before)
    prompt, output, memory = bins_of(support)
    logit: Real = odds[SCALE] * _stretched(share) + odds[BIAS]
    logit += odds[prompt] + odds[output] + odds[memory]
    logit += odds[alone] + odds[after_one] + odds[after_two]
    one = np.float32(1.0)
    rate: Real = one / (one + math.exp(-logit))
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
