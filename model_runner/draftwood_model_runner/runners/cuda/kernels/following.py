"""The inputs of a step that follows one in flight: what that one wrote, and the drafts that the device made of it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def continue_rows(
    tokens,
    positions,
    prefixes,
    parents,
    slots,
    ancestors,
    token_parts,
    parts,
    pages,
    offsets,
    written,
    counts,
    ends,
    sources,
    drafted,
    longest_contexts,
    draft_tokens,
    draft_parents,
    draft_counts,
    draft_stride,
    WRITTEN: tl.constexpr,
    NODES: tl.constexpr,
    USED_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Fills in what the host did not know when it laid a step out: one program a batch row.

    The host has laid each row out behind the longest context that it may have, with the most nodes that its draft may
    have. Nodes that it does not have become padding.

    Args:
        tokens, positions, prefixes, parents, slots, ancestors, parts: of the step, in and out, see `StepArrays`.
        token_parts, pages: of the step.
        offsets: int32[batch row + 1], where the tokens of each batch row begin.
        written, counts, ends: of the step in flight, as `accept_paths` leaves them; `written` has WRITTEN columns.
        sources: int32[batch row], its row in the step in flight.
        drafted: int32[batch row], its draft; negative for none.
        longest_contexts: int32[batch row], behind which the host has laid it out.
        draft_tokens, draft_parents: int32[draft, ...] with the stride given; a parent is a node, -1 for the root.
        draft_counts: int32[draft], nodes.
        NODES: tokens of a batch row at most.
        USED_WORDS: of the WORDS of an ancestor bitmask, those that a tree of NODES needs.
    """
    row = tl.program_id(0)
    begin = tl.load(offsets + row)
    size = tl.load(offsets + row + 1) - begin
    source = tl.load(sources + row)
    longest = tl.load(longest_contexts + row)
    context = tl.minimum(tl.load(ends + source), longest)
    draft = tl.load(drafted + row)
    nodes = tl.load(draft_counts + draft, mask=draft >= 0, other=0)
    nodes = tl.minimum(nodes, size - 1)
    tree = tl.maximum(draft, 0) * draft_stride

    lanes = tl.arange(0, NODES)
    at = begin + lanes
    filled = lanes < size
    is_node = (lanes > 0) & (lanes <= nodes)
    root = tl.load(written + source * WRITTEN + tl.load(counts + source))
    token = tl.load(draft_tokens + tree + lanes - 1, mask=is_node, other=0)
    parent = tl.load(draft_parents + tree + lanes - 1, mask=is_node, other=-1)
    tl.store(tokens + at, tl.where(lanes == 0, root, token), mask=filled)
    tl.store(parents + at, tl.where(is_node, begin + parent + 1, -1), mask=filled)
    tl.store(prefixes + at, tl.full([NODES], 1, tl.int32) + context, mask=filled)
    first = tl.load(token_parts + begin * 5)
    table = pages + tl.load(parts + first * 8 + 2)
    entries = context + lanes
    used = lanes <= nodes
    page = tl.load(table + entries // PAGE_SIZE, mask=used, other=0).to(tl.int64)
    tl.store(slots + at, tl.where(used, page * PAGE_SIZE + entries % PAGE_SIZE, -1), mask=filled)

    for word in tl.static_range(USED_WORDS):
        depth = tl.full([NODES], 0, tl.int32)
        bits = tl.full([NODES], 0, tl.int64)
        node = tl.where(is_node, lanes - 1, -1)
        deepest = tl.max(node, 0)
        while deepest >= 0:
            there = node >= 0
            depth += there.to(tl.int32)
            bit = tl.full([NODES], 1, tl.int64) << (node % 64).to(tl.int64)
            bits |= tl.where(there & (node // 64 == word), bit, 0)
            node = tl.load(draft_parents + tree + node, mask=there, other=-1)
            deepest = tl.max(node, 0)
        tl.store(ancestors + at * WORDS + word, bits, mask=filled)
        if word == 0:
            tl.store(positions + at, context + depth, mask=filled)
    for word in tl.static_range(USED_WORDS, WORDS):
        tl.store(ancestors + at * WORDS + word, tl.full([NODES], 0, tl.int64), mask=filled)

    last = begin + size - 1
    count = tl.load(token_parts + last * 5) + tl.load(token_parts + last * 5 + 1) - first
    behind = longest - context
    for start in range(0, count, NODES):
        of_part = parts + (first + start + lanes) * 8
        exists = start + lanes < count
        # The last run of a tile reads what its nodes see: up to the root.
        tile = token_parts + tl.load(of_part, mask=exists, other=0) * 5
        ends_tile = tl.load(tile, mask=exists, other=0) + tl.load(tile + 1, mask=exists, other=0) - 1
        end = tl.load(of_part + 4, mask=exists, other=0)
        reaches = ends_tile == first + start + lanes
        tl.store(of_part + 4, tl.where(reaches, tl.maximum(end, context + 1), end), mask=exists)
        tl.store(of_part + 5, tl.load(of_part + 5, mask=exists, other=0) - behind, mask=exists)
        tl.store(of_part + 6, tl.load(of_part + 6, mask=exists, other=0) - behind, mask=exists)
        tl.store(of_part + 7, tl.load(of_part + 7, mask=exists, other=0) + behind, mask=exists)
