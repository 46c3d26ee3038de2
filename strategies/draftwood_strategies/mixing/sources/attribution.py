"""Verified and accepted nodes by source, where a draft has several sources.

A node counts for its dominant source when it was drafted. What was verified may be less than what was drafted, since
the engine prunes, and more, where a grammar forces tokens.
"""

from __future__ import annotations

from draftwood_strategies.mixing.expansion import MixedDraft
from draftwood_strategies.mixing.weights import SOURCES
from draftwood_strategies.native import Int32Array, Int64Array, Integer, compiled
from draftwood_strategies.tree_index import NO_NODE

VERIFIED, ACCEPTED = range(2)
"""Rows of the counts, int64[2, SOURCES + 1]: a column for each source, the table last."""


@compiled
def attribute(
    drafted: MixedDraft,
    nodes: int,
    verified: Int32Array,
    verified_parents: Int32Array,
    accepted: Int32Array,
    located: Int32Array,
    counts: Int64Array,
) -> None:
    """Adds a step to the counts.

    Args:
        nodes: of the draft.
        verified, verified_parents: int32[m], the tree that was verified, as in `Feedback`: node 0 is its root.
        accepted: int32[a], the tokens that the step wrote.
        located: int32[m or more], workspace.
        counts: int64[2, SOURCES + 1].
    """
    located[0] = NO_NODE
    at, depth, latest = 0, 0, -1
    for node in range(1, verified.shape[0]):
        above = verified_parents[node]
        located[node] = NO_NODE
        if above == 0 or located[above] >= 0:
            located[node] = _find(drafted, nodes, verified[node], located[above], latest + 1)
        if above == at and depth < accepted.shape[0] and verified[node] == accepted[depth]:
            at, depth = node, depth + 1
        if located[node] >= 0:
            latest = located[node]
            source = drafted.sources[latest]
            if 0 <= source <= SOURCES:
                counts[VERIFIED, source] += 1
                if at == node:
                    counts[ACCEPTED, source] += 1


@compiled
def attribute_all(drafted: MixedDraft, nodes: int, accepted: Int32Array, counts: Int64Array) -> None:
    """As `attribute`, where the whole draft was verified."""
    at, depth = NO_NODE, 0
    for node in range(nodes):
        source = drafted.sources[node]
        right = drafted.parents[node] == at and depth < accepted.shape[0] and drafted.tokens[node] == accepted[depth]
        if right:
            at, depth = node, depth + 1
        if 0 <= source <= SOURCES:
            counts[VERIFIED, source] += 1
            counts[ACCEPTED, source] += 1 if right else 0


@compiled
def _find(drafted: MixedDraft, n: int, token: Integer, parent: Integer, first: Integer) -> int:
    """The drafted node with this token and parent; looked for from `first` on, since the engine keeps the order."""
    for step in range(n):
        node = first + step if first + step < n else first + step - n
        if drafted.tokens[node] == token and drafted.parents[node] == parent:
            return int(node)
    return NO_NODE
