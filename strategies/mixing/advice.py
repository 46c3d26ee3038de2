"""What several sources advise: their draft trees laid over one another by shared prefix, none's word lost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strategies.draft import Float32Array, Int32Array
from strategies.mixing.calibration import LEAST_CHANCE, SOURCES, Float32Table
from strategies.native import Integer, Real, compiled


class Advice(NamedTuple):
    """The trees of several sources laid over one another.

    Attributes:
        tokens, following: int32[m], each node's token and next sibling (-1 for none).
        first: int32[m + 1], the first child of the root and of each node (-1 for none).
        chances: float32[m, SOURCES], the probability that each source gives to a node once its parent is accepted; 0
            where the source does not hold the node.
    """

    tokens: Int32Array
    following: Int32Array
    first: Int32Array
    chances: Float32Table


def advice_for(nodes: int) -> Advice:
    """Room for `nodes` nodes, empty."""
    return Advice(
        np.empty(nodes, np.int32),
        np.empty(nodes, np.int32),
        np.full(nodes + 1, -1, np.int32),
        np.empty((nodes, SOURCES), np.float32),
    )


@compiled
def overlay(
    advised: Int32Array,
    following: Int32Array,
    first: Int32Array,
    chances: Float32Table,
    size: int,
    source: int,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    place: Int32Array,
) -> int:
    """Adds a source's draft tree to the advice, whose first `size` nodes are taken; returns the new size.

    Args:
        advised to chances: an `Advice`, laid out flat; `first[0]` is -1 where it is empty.
        place: int32[n], room for the place of each of the tree's n nodes in the advice.
    """
    for node in range(tokens.shape[0]):
        parent = parents[node]
        above = int(place[parent]) if parent >= 0 else -1
        at: Integer = first[above + 1]
        while at >= 0 and advised[at] != tokens[node]:
            at = following[at]
        if at < 0:
            at = size
            size += 1
            advised[at] = tokens[node]
            following[at] = first[above + 1]
            first[above + 1] = at
            first[at + 1] = -1
            for other in range(SOURCES):
                chances[at, other] = 0.0
        score_above: Real = scores[parent] if parent >= 0 else 1.0
        chance = scores[node] / score_above if score_above > 0.0 else 0.0
        chances[at, source] = min(1.0, max(LEAST_CHANCE, chance))
        place[node] = at
    return size
