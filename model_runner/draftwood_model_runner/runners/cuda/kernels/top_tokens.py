"""The most probable tokens of each row of logits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _ordered(values, tokens):
    """int64: keys that order as (value, -token) do, so that the greatest is the lowest of equally probable tokens."""
    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def top_of_blocks(logits, best, wanted, vocab, row_stride, blocks, BLOCK: tl.constexpr, TOP: tl.constexpr):
    """The TOP greatest keys of each block of a row: one program for each row and block.

    Args:
        logits: [row, vocab].
        best: int64[row, blocks, TOP], out.
        wanted: int32[1], rows that are not padding.
    """
    row = tl.program_id(0)
    if row >= tl.load(wanted):
        return
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row.to(tl.int64) * row_stride + tokens, mask=tokens < vocab, other=float("-inf"))
    keys = tl.where(tokens < vocab, _ordered(values, tokens), -(1 << 62))
    for i in tl.static_range(TOP):
        greatest = tl.max(keys, 0)
        tl.store(best + (row * blocks + block) * TOP + i, greatest)
        keys = tl.where(keys == greatest, -(1 << 62), keys)


@triton.jit
def top_of_rows(best, tokens, wanted, count, SIZE: tl.constexpr, TOP: tl.constexpr):
    """The TOP most probable tokens of each row, best first: one program for each row.

    Args:
        best: int64[row, count], of `top_of_blocks`.
        tokens: int32[row, TOP + 1], out; the last one is the first again, the token that is chosen.
        wanted: int32[1], rows that are not padding.
    """
    row = tl.program_id(0)
    if row >= tl.load(wanted):
        return
    at = tl.arange(0, SIZE)
    keys = tl.load(best + row * count + at, mask=at < count, other=-(1 << 62))
    for i in tl.static_range(TOP):
        greatest = tl.max(keys, 0)
        token = 0x7FFFFFFF - (greatest & 0xFFFFFFFF).to(tl.int32)
        tl.store(tokens + row * (TOP + 1) + i, token)
        if i == 0:
            tl.store(tokens + row * (TOP + 1) + TOP, token)
        keys = tl.where(keys == greatest, -(1 << 62), keys)
