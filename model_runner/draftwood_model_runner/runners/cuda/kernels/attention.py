"""Attention of draft trees over paged keys and values: in parts that run side by side, which are then merged.

The parts are those of Flash-Decoding (Dao et al., 2023): a tile of queries reads a run of the context, or all of the
step's own nodes, and leaves an unnormalized sum with its maximum. Parts are merged by log-sum-exp. Within the context
nothing is masked; among the nodes of a tree a query sees those whose bits are set in its ancestor words.

In exact mode the order of a query's sums depends on positions alone: runs begin at multiples of a constant, and a node
of a tree has parts of its own, which read its ancestors at the places of their positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kv(
    keys,
    values,
    kv,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Stores the keys and values of each token in its slot: one program for each token.

    Args:
        keys: [token, KV_HEADS, KEY_DIM], values: [token, KV_HEADS, VALUE_DIM], with the strides given, the last one 1.
        kv: [page, KV_HEADS, PAGE_SIZE, KEY_DIM + VALUE_DIM].
        slots: int64[token], page * PAGE_SIZE + row; negative for a token that is padding.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        heads = tl.arange(0, HEADS_BLOCK)[:, None]
        dims = tl.arange(0, BLOCK)[None, :]
        rows = ((slot // PAGE_SIZE * KV_HEADS + heads) * PAGE_SIZE + slot % PAGE_SIZE) * (KEY_DIM + VALUE_DIM)
        of_key = (heads < KV_HEADS) & (dims < KEY_DIM)
        key = tl.load(keys + token * key_token_stride + heads * key_head_stride + dims, mask=of_key)
        tl.store(kv + rows + dims, key.to(kv.dtype.element_ty), mask=of_key)
        of_value = (heads < KV_HEADS) & (dims < VALUE_DIM)
        value = tl.load(values + token * value_token_stride + heads * value_head_stride + dims, mask=of_value)
        tl.store(kv + rows + KEY_DIM + dims, value.to(kv.dtype.element_ty), mask=of_value)


@triton.jit
def move_kv(
    kv,
    moves,
    offsets,
    counts,
    layer_stride,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Moves entries within each layer: one program for each layer, head and sequence.

    Moves of a sequence are made one after the other: no slot is a target before it was read as a source.

    Args:
        kv: [layer, page, KV_HEADS, PAGE_SIZE, WIDTH].
        moves: int64[move, 2], source and target slots, page * PAGE_SIZE + row.
        offsets, counts: int32[sequence], the first move of each sequence, and how many it has.
    """
    layer = kv + tl.program_id(0).to(tl.int64) * layer_stride
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    begin = tl.load(offsets + tl.program_id(2))
    for move in range(begin, begin + tl.load(counts + tl.program_id(2))):
        source = tl.load(moves + 2 * move)
        target = tl.load(moves + 2 * move + 1)
        if source != target:
            source_row = ((source // PAGE_SIZE * KV_HEADS + head) * PAGE_SIZE + source % PAGE_SIZE) * WIDTH
            target_row = ((target // PAGE_SIZE * KV_HEADS + head) * PAGE_SIZE + target % PAGE_SIZE) * WIDTH
            entry = tl.load(layer + source_row + dims, mask=dims < WIDTH)
            tl.store(layer + target_row + dims, entry, mask=dims < WIDTH)


@triton.jit
def attention_parts(
    query,
    kv,
    sums,
    maxima,
    totals,
    tiles,
    tile_count,
    pages,
    prefixes,
    positions,
    ancestors,
    paths,
    scaling,
    softcap,
    window,
    query_token_stride,
    query_head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Sums of weighted values of all parts, and what is needed to merge them.

    A program takes one part after the other, so that the grid depends on the device and not on the batch.

    Args:
        query: [token, head, KEY_DIM] with the strides given, the last one 1.
        kv: [page, KV_HEADS, PAGE_SIZE, KEY_DIM + VALUE_DIM].
        sums: float32[part, KV_HEADS, ROWS, VALUE_BLOCK], out.
        maxima, totals: float32[part, KV_HEADS, ROWS], out: of the scores in powers of 2, and the sum of the weights.
        tiles: int32[part, 8], see `tiling.Tiles`.
        tile_count: int32[1], how many parts there are.
        pages: int32[...], page tables.
        prefixes, positions: int32[token]; a token sees the entries before its prefix, and the nodes of its words.
        ancestors: int64[token, WORDS].
        paths: int32[token, LEVELS], see `tiling.Tiles`. LEVELS is 0 where the mode is not exact.
        window: a token sees the last `window` positions.
    """
    parts = tl.load(tile_count)
    rows = tl.arange(0, ROWS)
    key_dims = tl.arange(0, KEY_BLOCK)
    value_dims = tl.arange(0, VALUE_BLOCK)
    for item in range(tl.program_id(0), parts * KV_HEADS, tl.num_programs(0)):
        part = item // KV_HEADS
        kv_head = item % KV_HEADS
        first = tl.load(tiles + part * 8)
        count = tl.load(tiles + part * 8 + 1)
        table = tl.load(tiles + part * 8 + 2)
        begin = tl.load(tiles + part * 8 + 3)
        end = tl.load(tiles + part * 8 + 4)
        tree = tl.load(tiles + part * 8 + 5)
        tree_end = tl.load(tiles + part * 8 + 6)
        offset = tl.load(tiles + part * 8 + 7)

        valid = rows < count * GROUP
        tokens = first + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        at = tokens.to(tl.int64) * query_token_stride + heads * query_head_stride
        q = tl.load(
            query + at[:, None] + key_dims[None, :], mask=valid[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0
        )
        prefix = tl.load(prefixes + tokens, mask=valid, other=0)
        if LEVELS > 0:
            prefix = tl.where(tree < end, end, prefix)
        position = tl.load(positions + tokens, mask=valid, other=0)
        oldest = position - window
        if WINDOWED:
            lowest = tl.min(tl.where(valid, oldest, 2147483647), 0) + 1
            begin = tl.maximum(begin, lowest // KEYS * KEYS)

        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
        weighted = tl.full([ROWS, VALUE_BLOCK], 0.0, tl.float32)
        for start in range(begin, end, KEYS):
            entries = start + tl.arange(0, KEYS)
            seen = entries[None, :] < tl.minimum(prefix, end)[:, None]
            if WINDOWED:
                seen = seen & (entries[None, :] > oldest[:, None])
            places = entries
            if LEVELS > 0:
                drafted = (entries >= tree) & (entries < end)
                path = paths + first.to(tl.int64) * LEVELS
                places = tl.where(drafted, tl.load(path + entries - tree, mask=drafted, other=0), entries)
            maximum, total, weighted = _attend(
                q, kv, pages + table, kv_head, places, entries < end, seen & valid[:, None], maximum, total, weighted,
                scaling, softcap, key_dims, value_dims, KV_HEADS, KEY_DIM, VALUE_DIM, PAGE_SIZE, CAPPED,
            )  # fmt: skip
        for start in range(tree, tree_end, KEYS):  # none in exact mode
            entries = start + tl.arange(0, KEYS)
            nodes = start - tree
            word = tl.load(ancestors + tokens.to(tl.int64) * WORDS + nodes // 64, mask=valid, other=0)
            bits = (nodes % 64 + tl.arange(0, KEYS)).to(tl.int64)
            seen = ((word[:, None] >> bits[None, :]) & 1) != 0
            if WINDOWED:
                ages = tl.load(positions + offset + entries, mask=entries < tree_end, other=0)
                seen = seen & (ages[None, :] > oldest[:, None])
            maximum, total, weighted = _attend(
                q, kv, pages + table, kv_head, entries, entries < tree_end, seen & valid[:, None], maximum, total,
                weighted, scaling, softcap, key_dims, value_dims, KV_HEADS, KEY_DIM, VALUE_DIM, PAGE_SIZE, CAPPED,
            )  # fmt: skip

        out = (part * KV_HEADS + kv_head).to(tl.int64) * ROWS + rows
        tl.store(maxima + out, maximum)
        tl.store(totals + out, total)
        tl.store(sums + out[:, None] * VALUE_BLOCK + value_dims[None, :], weighted)


@triton.jit
def _attend(
    q,
    kv,
    table,
    kv_head,
    entries,
    there,
    seen,
    maximum,
    total,
    weighted,
    scaling,
    softcap,
    key_dims,
    value_dims,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """The running maximum, total and sum of [ROWS] queries after they attended to the keys of [KEYS] entries."""
    page = tl.load(table + entries // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    rows = ((page * KV_HEADS + kv_head) * PAGE_SIZE + entries % PAGE_SIZE) * (KEY_DIM + VALUE_DIM)
    keys = tl.load(
        kv + rows[None, :] + key_dims[:, None], mask=there[None, :] & (key_dims < KEY_DIM)[:, None], other=0.0
    )
    scores = tl.dot(q, keys, input_precision="tf32x3") * scaling
    if CAPPED:
        # tanh, which Triton has for GPUs only in a library of CUDA's
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * LOG2_E * (2.0 / softcap)) + 1.0))
    scores = tl.where(seen, scores * LOG2_E, float("-inf"))
    highest = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    faded = tl.exp2(maximum - base)
    values = tl.load(
        kv + KEY_DIM + rows[:, None] + value_dims[None, :],
        mask=there[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    total = total * faded + tl.sum(weights, 1)
    weighted = weighted * faded[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="tf32x3")
    return highest, total, weighted


@triton.jit
def merge_parts(
    output,
    sums,
    maxima,
    totals,
    parts,
    sinks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    """Attention from the sums of its parts: one program for each token and head, which reads PARTS of them at a time.

    Args:
        output: [token, KV_HEADS * GROUP, VALUE_DIM], out; zeros for a token without parts.
        parts: int32[token, 5], see `tiling.Tiles`.
        sinks: [KV_HEADS * GROUP], logits that take part in the softmax only (gpt-oss).
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    first = tl.load(parts + token * 5)
    shared = tl.load(parts + token * 5 + 1)
    place = tl.load(parts + token * 5 + 2)
    drafted = tl.load(parts + token * 5 + 3)
    count = shared + tl.load(parts + token * 5 + 4)
    dims = tl.arange(0, VALUE_BLOCK)
    maximum = float("-inf")
    total = 0.0
    if WITH_SINKS:
        maximum = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = 1.0
    weighted = tl.full([VALUE_BLOCK], 0.0, tl.float32)
    for start in range(0, count, PARTS):
        i = start + tl.arange(0, PARTS)
        there = i < count
        part = tl.where(i < shared, first + i, drafted + i - shared)
        row = tl.where(i < shared, place * GROUP, 0) + head % GROUP
        at = (part * KV_HEADS + kv_head).to(tl.int64) * ROWS + row
        part_maxima = tl.load(maxima + at, mask=there, other=float("-inf"))
        part_totals = tl.load(totals + at, mask=there, other=0.0)
        part_sums = tl.load(sums + at[:, None] * VALUE_BLOCK + dims[None, :], mask=there[:, None], other=0.0)
        highest = tl.maximum(maximum, tl.max(part_maxima, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        faded = tl.exp2(maximum - base)
        part_faded = tl.exp2(part_maxima - base)
        total = total * faded + tl.sum(part_totals * part_faded, 0)
        weighted = weighted * faded + tl.sum(part_sums * part_faded[:, None], 0)
        maximum = highest
    total = tl.where(total == 0.0, 1.0, total)
    out = (token * KV_HEADS * GROUP + head).to(tl.int64) * VALUE_DIM + dims
    tl.store(output + out, (weighted / total).to(output.dtype.element_ty), mask=dims < VALUE_DIM)
