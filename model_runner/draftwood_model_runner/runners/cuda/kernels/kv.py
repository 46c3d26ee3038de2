"""Writes keys and values into their pages, and moves those of accepted nodes."""

from __future__ import annotations

import triton
import triton.language as tl


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
