"""Walks draft trees along the chosen tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accept_paths(
    sampled,
    tokens,
    parents,
    slots,
    logit_rows,
    offsets,
    on_device,
    moves,
    counts,
    sampled_stride,
    NODES: tl.constexpr,
):
    """The moves of keys and values of accepted nodes to their place after the committed ones: one program a batch row.

    Args:
        sampled: int32[row, ...] with the stride given, the token after each row of logits.
        tokens, parents: int32[token]; a parent is a token of the step, -1 for none.
        slots: int64[token].
        logit_rows: int32[row], the token of the step that each row of logits follows.
        offsets: int32[batch row + 1], the rows of logits of each batch row; the first is the root of its tree.
        on_device: int32[batch row], 0 for those that the host chooses for: no path is accepted.
        moves: int64[row, 2], out: source and target slot for each accepted node, from the first row of its tree on.
        counts: int32[batch row], out: accepted nodes.
    """
    batch_row = tl.program_id(0)
    begin = tl.load(offsets + batch_row)
    size = tl.load(offsets + batch_row + 1) - begin
    accepted = 0
    if (tl.load(on_device + batch_row) != 0) & (size > 1):
        root = tl.load(logit_rows + begin)
        nodes = tl.arange(0, NODES)
        there = (nodes > 0) & (nodes < size)
        node_tokens = tl.load(tokens + root + nodes, mask=there, other=-1)
        node_parents = tl.load(parents + root + nodes, mask=there, other=-1) - root
        node = 0
        while node >= 0:
            target = tl.load(sampled + (begin + node).to(tl.int64) * sampled_stride)
            follows = there & (node_parents == node) & (node_tokens == target)
            child = tl.min(tl.where(follows, nodes, NODES), 0)
            node = tl.where(child < NODES, child, -1)
            if node >= 0:
                source = tl.load(slots + root + node)
                accepted += 1
                behind = tl.load(slots + root + accepted)
                tl.store(moves + 2 * (begin + accepted - 1), source)
                tl.store(moves + 2 * (begin + accepted - 1) + 1, behind)
    tl.store(counts + batch_row, accepted)
