"""What each source is worth: by how much it raised the probability of the tokens that came.

A source is compared with what the others would have said without it. So one that only repeats them gains nothing, and
one that is wrong with confidence gains less than nothing.
"""

from __future__ import annotations

import math

from strategies.draft import Int32Array
from strategies.mixing.advice import Advice
from strategies.mixing.calibration import ADVISED, LOGIT, RANKS, SOURCES, TABLE, Weights
from strategies.mixing.successors import ORDERS, WIDTH
from strategies.mixing.weighing import Room
from strategies.native import Real, compiled

_RATE = 0.005


@compiled
def record_gains(
    advice: Advice, weights: Weights, room: Room, n: int, came: int, longest: int, level: int, awake: Int32Array
) -> None:
    """Compares the probability of the token that came with what it is without each source."""
    for source in range(SOURCES + 1):
        if not awake[source]:
            continue
        gain = 0.0
        if came > 0:
            others = 0
            for other in range(SOURCES):
                if other != source:
                    others = max(others, room.levels[other])
            without = _probability_without(advice, weights, room, n, came, source, longest, level, others)
            gain = room.probabilities[came] - without
        weights.gains[source] += _RATE * (gain - weights.gains[source])


@compiled
def _probability_without(
    advice: Advice,
    weights: Weights,
    room: Room,
    n: int,
    came: int,
    source: int,
    longest: int,
    level: int,
    level_of_others: int,
) -> Real:
    """The probability of candidate `came` had a source been silent; 0 if only that source has it.

    Args:
        longest, level: what `weigh` returned.
        level_of_others: how sure the surest of the other tree-shaped sources is.
    """
    said, escapes = room.said, weights.escapes
    if source == TABLE:
        none = said[0, LOGIT] - escapes[level, longest] + escapes[level, 0]
    else:
        none = said[0, LOGIT] - said[0, source] - escapes[level, longest] + escapes[level_of_others, longest]
    right = 0.0
    total = math.exp(none)
    for i in range(1, n):
        if _others_hold(advice, room, i, source):
            weight = math.exp(said[i, LOGIT] - said[i, source])
            total += weight
            if i == came:
                right = weight
    return right / total


@compiled
def _others_hold(advice: Advice, room: Room, i: int, source: int) -> bool:
    """Whether any other source has candidate i."""
    held = False
    for other in range(SOURCES + 1):
        held = held or (other != source and _holds(advice, room, i, other))
    return held


@compiled
def most_outspoken(advice: Advice, room: Room, i: int) -> int:
    """The source that has candidate i and raised it most above "none of these"; -1 where none has it."""
    best, most = -1, 0.0
    for source in range(SOURCES + 1):
        raised = room.said[i, source] - room.said[0, source]
        if _holds(advice, room, i, source) and (best < 0 or raised > most):
            best, most = source, raised
    return best


@compiled
def _holds(advice: Advice, room: Room, i: int, source: int) -> bool:
    if source != TABLE:
        place = room.candidates[i, ADVISED]
        return bool(place >= 0 and advice.chances[place, source] > 0.0)
    least = WIDTH
    for order in range(ORDERS):
        least = min(least, room.candidates[i, RANKS + order])
    return least < WIDTH
