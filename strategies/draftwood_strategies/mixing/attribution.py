"""Verified and accepted nodes by source, where a draft has several sources.

A node counts for its dominant source when it was drafted. What was verified may be less than what was drafted: the
engine prunes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draftwood_strategies.mixing.weights import SOURCES
from draftwood_strategies.native import Int32Array, Int64Array, compiled, flattened
from draftwood_strategies.tree_index import TreeIndex, find_child, link_all, locate, unlinked

VERIFIED, ACCEPTED = range(2)
"""Rows of the counts, int64[2, SOURCES + 1]: a column for each source, the table last."""


class DraftedNodes(NamedTuple):
    """A tree that was drafted.

    Attributes:
        tokens, parents: int32[n], as in `DraftTree`.
        sources: int32[n], the dominant source of each node; below 0 for none.
    """

    tokens: Int32Array
    parents: Int32Array
    sources: Int32Array


def attribute(
    drafted: DraftedNodes, verified: Int32Array, verified_parents: Int32Array, accepted: Int32Array, counts: Int64Array
) -> None:
    """Adds a step to the counts.

    Args:
        verified, verified_parents: int32[m], the tree that was verified, as in `Feedback`: node 0 is its root.
        accepted: int32[a], the tokens that the step wrote.
        counts: int64[2, SOURCES + 1].
    """
    located, sources = np.empty(drafted.tokens.shape[0], np.int32), np.empty(verified.shape[0], np.int32)
    _attribute(drafted, unlinked(verified), verified_parents, accepted, located, sources, counts)


@flattened
@compiled
def _attribute(
    drafted: DraftedNodes,
    verified: TreeIndex,
    verified_parents: Int32Array,
    accepted: Int32Array,
    located: Int32Array,
    sources: Int32Array,
    counts: Int64Array,
) -> None:
    """See `attribute`; `located`, int32[n], and `sources`, int32[m], are workspace."""
    link_all(verified, verified_parents)
    locate(verified, 0, drafted.tokens, drafted.parents, located)
    for node in range(sources.shape[0]):
        sources[node] = -1
    for i in range(located.shape[0]):
        if located[i] >= 0:
            sources[located[i]] = drafted.sources[i]
            if drafted.sources[i] >= 0:
                counts[VERIFIED, drafted.sources[i]] += 1
    node = 0
    for depth in range(accepted.shape[0]):
        node = find_child(verified, node, accepted[depth])
        if node < 0:
            return
        if 0 <= sources[node] <= SOURCES:
            counts[ACCEPTED, sources[node]] += 1
