"""The frontier of a draft: the nodes that may be drafted next, the best score first."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np

from draftwood_strategies.native import Integer, Real, compiled
from draftwood_strategies.structs import copy_record, record_dtype

FRONTIER_ENTRY = record_dtype(score=np.float32, node=np.int32)
"""A node's score and its number."""
Frontier: TypeAlias = Annotated[Any, FRONTIER_ENTRY]
"""FRONTIER_ENTRY[k]; the frontier are those from `begin` to `end`."""


@compiled
def takes(frontier: Frontier, begin: int, end: int, wanted: Integer, score: Real) -> bool:
    """Whether a node of this score is among the `wanted` best."""
    return bool(end - begin < wanted or score > frontier[end - 1].score)


@compiled
def offer(frontier: Frontier, begin: int, end: int, wanted: Integer, score: Real, node: Integer) -> int:
    """Puts a node into the frontier if it is among the `wanted` best; returns the new end."""
    if not takes(frontier, begin, end, wanted, score):
        return end
    if end - begin == wanted:
        end -= 1
    at = end
    while at > begin and frontier[at - 1].score < score:
        copy_record(frontier[at], frontier[at - 1])
        at -= 1
    frontier[at].score = score
    frontier[at].node = node
    return end + 1
