"""Verified and accepted nodes by source, where a draft has several sources.

A node counts for its dominant source when it was drafted. What was verified may be less than what was drafted, since
the engine prunes, and more, where a grammar forces tokens.
"""

from __future__ import annotations

from draftwood_strategies.mixing.expansion import MixedDraft
from draftwood_strategies.native import Int32Array, Int64Array, Integer, compiled
from draftwood_strategies.tree_index import NO_NODE

VERIFIED, ACCEPTED = range(2)
"""Rows of the counts, int64[2, SOURCES + 1]: a column for each source, the table last."""


@compiled
def attribute(
    drafted: MixedDraft,
    nodes: int,
    has_feedback: bool,
    verified: Int32Array,
    verified_parents: Int32Array,
    accepted: Int32Array,
    located: Int32Array,
    counts: Int64Array,
) -> None:
    """Adds a step to the counts.

    Args:
        nodes: of the draft.
        has_feedback: `verified` and `verified_parents`, int32[m], are the tree that was verified, as in `Feedback`;
            else it was the whole draft.
        accepted: int32[a], the tokens that the step wrote.
        located: int32[nodes or more], workspace.
        counts: int64[2, SOURCES + 1].
    """
    at, depth, latest = NO_NODE, 0, 0
    for node in range(nodes):
        parent, token = drafted.parents[node], drafted.tokens[node]
        if has_feedback:
            located[node] = NO_NODE
            above: Integer = located[parent] if parent >= 0 else 0
            if above >= 0:
                located[node] = _find(verified, verified_parents, token, above, latest)
            if located[node] < 0:
                continue
            latest = located[node]
        counts[VERIFIED, drafted.sources[node]] += 1
        if parent == at and depth < accepted.shape[0] and token == accepted[depth]:
            at, depth = node, depth + 1
            counts[ACCEPTED, drafted.sources[node]] += 1


@compiled
def _find(verified: Int32Array, parents: Int32Array, token: Integer, parent: Integer, first: Integer) -> int:
    """The verified node with this token and parent; looked for from `first` on, since the engine keeps the order."""
    n = verified.shape[0]
    for step in range(n):
        node = (first + step) % n
        if verified[node] == token and parents[node] == parent:
            return int(node)
    return NO_NODE
