"""The frontier of a draft: nodes that may be drafted next, the best score first, no more than there is space for."""

from __future__ import annotations

from draftwood_strategies.native import Float32Array, Int32Array, Integer, compiled


@compiled
def offer(frontier: Int32Array, begin: int, end: int, wanted: int, scores: Float32Array, node: Integer) -> int:
    """Puts a node into the frontier if it is among the `wanted` best; returns the new end.

    Args:
        frontier: int32[k]; the frontier is `frontier[begin:end]`.
        scores: float32[m, 2], the score of each node in column 0.
    """
    score = scores[node, 0]
    if end - begin == wanted:
        if score <= scores[frontier[end - 1], 0]:
            return end
        end -= 1
    at = end
    while at > begin and scores[frontier[at - 1], 0] < score:
        frontier[at] = frontier[at - 1]
        at -= 1
    frontier[at] = node
    return end + 1
