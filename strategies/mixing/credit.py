"""Whose nodes were verified and whose were accepted, where a draft has several sources.

A node counts for the source that spoke most for it when it was drafted. What was verified may be less than what was
drafted: the engine prunes.
"""

from __future__ import annotations

from strategies.draft import Int32Array
from strategies.mixing.calibration import SOURCES
from strategies.native import Int64Array, Integer, compiled

VERIFIED, ACCEPTED = range(2)
"""Rows of the counts, int64[2, SOURCES + 1]: a column for each source, the table last."""

_PLACE, _OWNER = range(2)


@compiled
def credit(
    tokens: Int32Array,
    parents: Int32Array,
    sources: Int32Array,
    verified: Int32Array,
    verified_parents: Int32Array,
    accepted: Int32Array,
    room: Int32Array,
    counts: Int64Array,
) -> None:
    """Adds a step to the counts.

    Args:
        tokens, parents, sources: int32[n], the tree that was drafted, and whose each node is; below 0 for nobody's.
        verified, verified_parents: int32[m], the tree that was verified, as in `Feedback`: node 0 is its root.
        accepted: int32[a], what the sequence grew by.
        room: int32[max(n, m) or more, 2 or more].
    """
    for node in range(verified.shape[0]):
        room[node, _OWNER] = -1
    for i in range(tokens.shape[0]):
        above: Integer = room[parents[i], _PLACE] if parents[i] >= 0 else 0
        place = _child(verified, verified_parents, above, tokens[i], i + 1) if above >= 0 else -1
        room[i, _PLACE] = place
        if place >= 0:
            room[place, _OWNER] = sources[i]
            if sources[i] >= 0:
                counts[VERIFIED, sources[i]] += 1
    at = 0
    for depth in range(accepted.shape[0]):
        at = _child(verified, verified_parents, at, accepted[depth], at + 1)
        if at < 0:
            return
        owner = room[at, _OWNER]
        if 0 <= owner <= SOURCES:
            counts[ACCEPTED, owner] += 1


@compiled
def _child(tokens: Int32Array, parents: Int32Array, above: Integer, token: Integer, likely: int) -> int:
    """The node that carries `token` under node `above`, tried at `likely` first; -1 for none."""
    if likely < tokens.shape[0] and tokens[likely] == token and parents[likely] == above:
        return likely
    for node in range(above + 1, tokens.shape[0]):
        if tokens[node] == token and parents[node] == above:
            return int(node)
    return -1
