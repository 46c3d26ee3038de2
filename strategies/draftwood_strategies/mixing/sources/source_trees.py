"""The draft trees of several sources merged by shared prefix, with every source's probabilities."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from draftwood_strategies.mixing.weights import LEAST_CHANCE, SOURCES
from draftwood_strategies.native import Float32Array, Int32Array, Real, compiled
from draftwood_strategies.tree_index import TreeIndex, insert


class SourceTrees(NamedTuple):
    """The merged trees of the sources.

    Attributes:
        tree: the tokens of the m nodes and their links.
        chances: float32[m, SOURCES], the probability that each source gives to a node once its parent is accepted; 0
            where the source does not have the node.
    """

    tree: TreeIndex
    chances: Annotated[Float32Array, 2]


@compiled
def add_source(
    trees: SourceTrees,
    size: int,
    source: int,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    located: Int32Array,
) -> int:
    """Adds a source's draft tree to the merged ones, which have `size` nodes; returns the new size.

    Args:
        tokens, parents, scores: [n], a `DraftTree`; the merged trees have space for all its nodes.
        located: int32[n or more], workspace.
    """
    end = insert(trees.tree, size, tokens, parents, located)
    for node in range(size, end):
        for other in range(SOURCES):
            trees.chances[node, other] = 0.0
    for i in range(tokens.shape[0]):
        score_above: Real = scores[parents[i]] if parents[i] >= 0 else 1.0
        chance = scores[i] / score_above if score_above > 0.0 else 0.0
        trees.chances[located[i], source] = min(1.0, max(LEAST_CHANCE, chance))
    return end
