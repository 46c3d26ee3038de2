"""Verification: which nodes of a draft tree the model itself would have written. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from strategies.draft import Int32Array

ROOT = 0
"""The node of the last committed token; the nodes of the draft follow."""


def walk(tokens: Int32Array, parents: Int32Array, choose: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Walks from the root along the tokens that the model chooses, and yields each with the node that carries it.

    The choice is the model's at every step, so what is yielded is what plain decoding writes, whatever the tree.

    Args:
        tokens, parents: int32[n], the tree with its root, which is node 0.
        choose: the model's token after a node.

    Yields:
        (token, node). The last one's node is `ROOT`: no draft carries it, it is the model's own.
    """
    children = {key: node for node, key in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True))}
    node = ROOT
    while True:
        token = choose(node)
        node = children.get((node, token), ROOT)
        yield token, node
        if node == ROOT:
            return
