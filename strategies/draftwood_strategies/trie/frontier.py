"""The frontier of a draft: a binary heap of nodes, the best score first."""

from __future__ import annotations

from draftwood_strategies.native import Float32Array, Int32Array, Integer, compiled


@compiled
def push(heap: Int32Array, size: int, scores: Float32Array, node: Integer) -> None:
    """Adds a node to the heap of `size` nodes.

    Args:
        scores: float32[k, 2], the score of each node in column 0.
    """
    i = size
    while i > 0:
        above = (i - 1) >> 1
        if scores[heap[above], 0] >= scores[node, 0]:
            break
        heap[i] = heap[above]
        i = above
    heap[i] = node


@compiled
def pop(heap: Int32Array, size: int, scores: Float32Array) -> int:
    """Takes the best node from the heap of `size` nodes."""
    best = heap[0]
    last = heap[size - 1]
    i = 0
    while True:
        below = 2 * i + 1
        if below >= size - 1:
            break
        if below + 1 < size - 1 and scores[heap[below + 1], 0] > scores[heap[below], 0]:
            below += 1
        if scores[heap[below], 0] <= scores[last, 0]:
            break
        heap[i] = heap[below]
        i = below
    heap[i] = last
    return int(best)
