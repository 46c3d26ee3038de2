"""The tokens that may follow one node of a draft, and what every source says of them.

Knows nothing of drafts as a whole, nor of how weights are learned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from strategies.draft import Int32Array
from strategies.mixing.advice import Advice
from strategies.mixing.calibration import (
    ADVISED,
    LOGIT,
    NONE_OF_THESE,
    RANKS,
    SOURCES,
    TABLE,
    TOKEN,
    Float64Array,
    Float64Table,
    Weights,
    chance_bin,
    left_over,
    level_of,
)
from strategies.mixing.successors import ORDERS, STEADY, WIDTH, extended, find
from strategies.native import Integer, Real, compiled

NOT_ADVISED = -2
_MOST_CANDIDATES = 160
_MOST_ADVISED = _MOST_CANDIDATES - ORDERS * WIDTH


class Room(NamedTuple):
    """Room to mix in. Holds nothing between two drafts.

    Attributes:
        candidates: int32[c, RANKS + ORDERS], the tokens that may follow a node, see `calibration`.
        said: float64[c, LOGIT + 1].
        probabilities: float64[c].
        context, found, steadiness: int32[ORDERS], a node's last tokens, the newest first, the rows of its contexts
            (-1 for unknown ones), and how steady these are.
        levels: int32[SOURCES].
        left: float64[SOURCES].
        items: int32[k, 4], nodes made: token, parent in the draft, place in the advice, source.
        item_scores: float64[k].
        waiting: int32[budget + 1], the frontier from the number of drafted nodes on, the best first.
    """

    candidates: Int32Array
    said: Float64Table
    probabilities: Float64Array
    context: Int32Array
    found: Int32Array
    steadiness: Int32Array
    levels: Int32Array
    left: Float64Array
    items: Int32Array
    item_scores: Float64Array
    waiting: Int32Array


def room_for(budget: int) -> Room:
    """Room for trees of at most `budget` nodes."""
    return Room(
        candidates=np.empty((_MOST_CANDIDATES, RANKS + ORDERS), np.int32),
        said=np.empty((_MOST_CANDIDATES, LOGIT + 1), np.float64),
        probabilities=np.empty(_MOST_CANDIDATES, np.float64),
        context=np.empty(ORDERS, np.int32),
        found=np.empty(ORDERS, np.int32),
        steadiness=np.empty(ORDERS, np.int32),
        levels=np.empty(SOURCES, np.int32),
        left=np.empty(SOURCES, np.float64),
        items=np.empty((64 * budget + _MOST_CANDIDATES, 4), np.int32),
        item_scores=np.empty(64 * budget + _MOST_CANDIDATES, np.float64),
        waiting=np.empty(budget + 1, np.int32),
    )


@compiled
def weigh(advice: Advice, weights: Weights, room: Room, rows: Int32Array, place: Integer) -> tuple[int, int, int]:
    """Fills the room with the candidates after a node, whose context it holds, and with what is said of them.

    Args:
        rows: int32[r, COLUMNS], the successor table; without rows, none.
        place: the node in the advice; -1 for the root, `NOT_ADVISED` for a node that is not in it.

    Returns:
        How many candidates there are, the longest known context, and how sure the surest source is.
    """
    candidates, said = room.candidates, room.said
    n = _advised_candidates(advice, room, place)
    level = 0
    for source in range(SOURCES):
        best: Real = 0.0
        rest: Real = 1.0
        for i in range(1, n):
            chance = advice.chances[candidates[i, ADVISED], source]
            best = max(best, chance)
            rest -= chance
        room.levels[source] = level_of(best)
        room.left[source] = left_over(rest)
        level = max(level, room.levels[source])
    longest = _find_rows(room, rows)
    for i in range(n):
        _say(advice, weights, room, i)
    said[0, LOGIT] += weights.escapes[level, longest]
    for back in range(longest):
        order = longest - 1 - back
        row = room.found[order]
        if row < 0:
            continue
        steady = room.steadiness[order]
        for rank in range(WIDTH):
            i = 1
            while i < n and candidates[i, TOKEN] != rows[row, rank]:
                i += 1
            if i == n:
                _clear(candidates, i, rows[row, rank], -1)
                _say(advice, weights, room, i)
                n += 1
            weight = weights.ranks[level, longest, order, steady, rank]
            candidates[i, RANKS + order] = rank
            said[i, TABLE] += weight
            said[i, LOGIT] += weight
    return n, longest, level


@compiled
def _advised_candidates(advice: Advice, room: Room, place: Integer) -> int:
    """Candidate 0, and the children of a node in the advice; returns how many that are."""
    _clear(room.candidates, 0, NONE_OF_THESE, -1)
    n = 1
    child: Integer = advice.first[int(place) + 1] if place != NOT_ADVISED else -1
    while child >= 0 and n < _MOST_ADVISED:
        _clear(room.candidates, n, advice.tokens[child], child)
        n += 1
        child = advice.following[child]
    return n


@compiled
def _clear(candidates: Int32Array, i: int, token: Integer, place: Integer) -> None:
    candidates[i, TOKEN] = token
    candidates[i, ADVISED] = place
    for order in range(ORDERS):
        candidates[i, RANKS + order] = WIDTH


@compiled
def _find_rows(room: Room, rows: Int32Array) -> int:
    """Looks up the rows of the room's context; returns the order of the longest known one, 0 for none."""
    context_hash: Integer = 0
    longest = 0
    for order in range(ORDERS):
        room.found[order] = -1
        room.steadiness[order] = -1
        if room.context[order] >= 0 and rows.shape[0] > 0:
            context_hash = extended(context_hash, room.context[order])
            row = find(rows, context_hash)
            if row >= 0:
                room.found[order] = row
                room.steadiness[order] = rows[row, STEADY]
                longest = order + 1
    return longest


@compiled
def _say(advice: Advice, weights: Weights, room: Room, i: int) -> None:
    """Sets what the tree-shaped sources say of candidate i; the table says nothing yet."""
    place = room.candidates[i, ADVISED]
    total = 0.0
    for source in range(SOURCES):
        level = room.levels[source]
        word = 0.0
        if level > 0:
            chance: Real = advice.chances[place, source] if place >= 0 else 0.0
            if chance > 0.0:
                word = weights.trust[source, level] * math.log(chance) + weights.bias[source, level, chance_bin(chance)]
            else:
                word = weights.trust[source, level] * room.left[source]
        room.said[i, source] = word
        total += word
    room.said[i, TABLE] = 0.0
    room.said[i, LOGIT] = total
