"""Novel tokens: those that came where no earlier occurrence of the context had them, the most frequent ones first.

What no context predicts is far from uniform: punctuation, articles, line breaks. This is order 0 of prediction by
partial matching (PPM), with its update exclusion: only tokens that the votes missed are counted, so that a count says
how probable a token is where they miss.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np

from draftwood_strategies.native import Integer, Real, compiled
from draftwood_strategies.structs import record_dtype

NOVEL = record_dtype(token=np.int32, count=np.float32)
"""A token and how often it came, recent times counting more."""
Novel: TypeAlias = Annotated[Any, NOVEL]
"""NOVEL[COUNTED + 1], the highest count first; the last entry has the sum of all counts."""

NO_VOTES = -1
"""What speaks for a novel token, in place of what `odds.with_match` returns: it has no odds, its share of the votes is
its probability. With odds acceptance lengths are the same within 0.4%, and a draft of 64 nodes takes 2.4 us longer."""

COUNTED = 256
"""How many tokens are counted at a time."""
_DECAY, _UNSEEN = 0.999, 20.0
"""What each miss leaves of all counts, and the count of tokens that are not counted. 0.995 and 0.9998 change acceptance
lengths by -0.2 and -0.0% (docs/decisions, "Tokens that no context predicts")."""


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
