"""Tokens that came where no candidate had them, the most frequent first: the order 0 of prediction by partial matching.

What no earlier context predicts is far from uniform: commas, articles, line breaks. Only misses are counted (PPM's update
exclusion), so these are the probabilities of a token given that the votes miss it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np

from draftwood_strategies.native import Integer, Real, compiled
from draftwood_strategies.structs import record_dtype

NOVEL = record_dtype(token=np.int32, count=np.float32)
"""A token and how often it came, recent times counting more."""
Novel: TypeAlias = Annotated[Any, NOVEL]
"""NOVEL[COUNTED + 1], the highest count first; the last entry's count is the sum of all."""

COUNTED = 256
"""How many tokens are counted."""
DRAFTED = 64
"""How many are drafted at most below a node."""
_DECAY = 0.999
_UNSEEN = 20.0


def no_novel() -> Novel:
    table = np.zeros(COUNTED + 1, NOVEL)
    table["token"] = -1
    return table


@compiled
def novel_chance(novel: Novel, rank: Integer) -> Real:
    """The probability of the token of this rank where the votes miss; 0 beyond the last one."""
    chance: Real = novel[rank].count / (novel[COUNTED].count + np.float32(_UNSEEN))
    return chance


@compiled
def count_novel(novel: Novel, token: Integer) -> None:
    """Counts a miss. A token that is not counted yet takes the place of the least frequent one."""
    at = 0
    total = np.float32(0.0)
    for rank in range(COUNTED):
        novel[rank].count *= np.float32(_DECAY)
    while at < COUNTED - 1 and novel[at].token != token:
        at += 1
    if novel[at].token != token:
        novel[at].token = token
        novel[at].count = 0.0
    count = novel[at].count + np.float32(1.0)
    while at > 0 and novel[at - 1].count <= count:
        novel[at].token, novel[at].count = novel[at - 1].token, novel[at - 1].count
        at -= 1
    novel[at].token, novel[at].count = token, count
    for rank in range(COUNTED):
        total += novel[rank].count
    novel[COUNTED].count = total
