"""Paths from the root as one tree, and the model's predictions after them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from draftwood_strategies.base import Feedback
from draftwood_strategies.native import Int32Array, compiled
from draftwood_strategies.tree_index import NO_NODE, TreeIndex, link_all, locate, unlinked


class Paths(NamedTuple):
    """Paths one after the other, laid out as a draft tree with equal siblings.

    Attributes:
        tokens, parents: int32[n].
        ends: int32[p], the last node of each path.
    """

    tokens: Int32Array
    parents: Int32Array
    ends: Int32Array


def joined(paths: Iterable[SequenceOf[int]]) -> Paths:
    """The tree of paths of one token or more."""
    tokens: list[int] = []
    parents: list[int] = []
    ends: list[int] = []
    for path in paths:
        parents += [NO_NODE, *range(len(tokens), len(tokens) + len(path) - 1)]
        tokens += path
        ends.append(len(tokens) - 1)
    return Paths(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(ends, np.int32))


def predictions_after(paths: Paths, feedback: Feedback) -> list[int | None]:
    """The model's token after each path; None where it was not verified: the tree may have been pruned."""
    located = np.empty(paths.tokens.shape[0], np.int32)
    _locate(unlinked(feedback.tokens), feedback.parents, paths.tokens, paths.parents, located)
    nodes = located[paths.ends]
    predicted = feedback.predictions[nodes].tolist()
    return [token if node >= 0 else None for node, token in zip(nodes.tolist(), predicted, strict=True)]


@compiled
def _locate(
    verified: TreeIndex, verified_parents: Int32Array, tokens: Int32Array, parents: Int32Array, located: Int32Array
) -> None:
    link_all(verified, verified_parents)
    locate(verified, 0, tokens, parents, located)
