"""Verification: finds the path of a draft tree that the model itself writes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from strategies.draft import Int32Array
from strategies.native import flattened
from strategies.tree_index import find_child, link_all, unlinked

_find_child = flattened(find_child)
_link_all = flattened(link_all)

ROOT_NODE = 0
"""The node of the last committed token; the nodes of the draft follow."""


def walk(tokens: Int32Array, parents: Int32Array, choose: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Walks from the root along the tokens that the model chooses, and yields each with the node that carries it.

    The model chooses every token, so what is yielded is the output of plain decoding, whatever the tree.

    Args:
        tokens, parents: int32[n], the tree with its root, which is node 0.
        choose: the model's token after a node.

    Yields:
        (token, node). The node of the last one is `ROOT_NODE`: it was not drafted.
    """
    if tokens.shape[0] == 1:  # nothing was drafted
        yield choose(ROOT_NODE), ROOT_NODE
        return
    index = unlinked(tokens)
    _link_all(index, parents)
    node = ROOT_NODE
    while True:
        token = choose(node)
        node = max(_find_child(index, node, token), ROOT_NODE)
        yield token, node
        if node == ROOT_NODE:
            return
