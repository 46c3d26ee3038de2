"""Random draft trees."""

from __future__ import annotations

import numpy as np

from draftwood_strategies.draft import EMPTY_TREE, DraftTree


def random_tree(random: np.random.Generator, nodes: int, deep: float) -> DraftTree:
    """`deep`: how likely a node hangs from the one before it."""
    if not nodes:
        return EMPTY_TREE
    parents = [i - 1 if random.random() < deep else int(random.integers(-1, i)) for i in range(nodes)]
    return DraftTree.of([*range(nodes)], parents)
