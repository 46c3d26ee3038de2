"""The small operations of a layer, several in one kernel, and linear layers that sum in one order.

What replaces several operations is rounded wherever they round.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    hidden, residual, total, weight, output, epsilon, row_stride, head_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ADD_ONE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Root mean square norm (Zhang and Sennrich, 2019) of the last dimension: one program for each row and head.

    Args:
        hidden: [row, head, SIZE] with the strides given; output: [row, head, SIZE].
        residual, total: [row, head, SIZE]; with ADDED, `total` is set to hidden + residual, and that is normed.
        weight: [SIZE]; with ADD_ONE, 1 is added to it and the product is not rounded before (Gemma).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    place = (row * tl.num_programs(1) + head) * SIZE + at
    kind = output.dtype.element_ty
    values = tl.load(hidden + row * row_stride + head * head_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        added = (values + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(total + place, added, mask=inside)
        values = added.to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    normed = normed * (scale + 1.0) if ADD_ONE else normed.to(kind).to(tl.float32) * scale
    tl.store(output + place, normed.to(kind), mask=inside)


@triton.jit
def silu_product(gate, up, output, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    """silu(gate) * up: one program for each row and BLOCK of its columns.

    Args:
        gate, up: [row, width] with the row strides given; output: [row, width].
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    opened = tl.load(gate + row * gate_stride + at, mask=at < width, other=0.0).to(tl.float32)
    opened = (opened / (1.0 + tl.exp(-opened))).to(output.dtype.element_ty).to(tl.float32)
    product = opened * tl.load(up + row * up_stride + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(output + row * width + at, product.to(output.dtype.element_ty), mask=at < width)


@triton.jit
def rotate(
    query, key, cosines, sines, turned_query, turned_key, query_token_stride, query_head_stride, key_token_stride,
    key_head_stride, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
    KV_HEADS_BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotary position embedding (Su et al., 2021) of halves: two programs for each token, for its query and its key.

    Args:
        query: [token, HEADS, 2 * HALF], key: [token, KV_HEADS, 2 * HALF], with the strides given, the last one 1.
        cosines, sines: [token, 2 * HALF].
        turned_query, turned_key: the shapes of query and key, out.
    """
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _turn(query + token * query_token_stride, query_head_stride, cosines, sines, turned_query, token, HEADS,
              HEADS_BLOCK, HALF, BLOCK)  # fmt: skip
    else:
        _turn(key + token * key_token_stride, key_head_stride, cosines, sines, turned_key, token, KV_HEADS,
              KV_HEADS_BLOCK, HALF, BLOCK)  # fmt: skip


@triton.jit
def _turn(
    hidden, head_stride, cosines, sines, output, token, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates the heads of a token, [HEADS, 2 * HALF] at `hidden`."""
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    there = (heads < HEADS) & (dims < HALF)
    kind = output.dtype.element_ty
    source = hidden + heads * head_stride + dims
    first = tl.load(source, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    angles = token * 2 * HALF + dims
    inside = dims < HALF
    first_cosine = tl.load(cosines + angles, mask=inside, other=0.0).to(tl.float32)
    second_cosine = tl.load(cosines + angles + HALF, mask=inside, other=0.0).to(tl.float32)
    first_sine = tl.load(sines + angles, mask=inside, other=0.0).to(tl.float32)
    second_sine = tl.load(sines + angles + HALF, mask=inside, other=0.0).to(tl.float32)
    turned = (first * first_cosine).to(kind).to(tl.float32) - (second * first_sine).to(kind).to(tl.float32)
    other = (second * second_cosine).to(kind).to(tl.float32) + (first * second_sine).to(kind).to(tl.float32)
    target = output + (token * HEADS + heads) * 2 * HALF + dims
    tl.store(target, turned.to(kind), mask=there)
    tl.store(target + HALF, other.to(kind), mask=there)


@triton.jit(do_not_specialize=["rows"])
def linear(
    hidden, weight, bias, output, rows, columns, inner, column_stride, inner_stride,
    WITH_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """hidden @ weight + bias: one program for each block of the output.

    The blocks, and so the instructions and their order, are the same for one row as for many. Libraries choose them by
    the number of rows, and may divide the sum between programs (as He et al. found of inference in general, "Defeating
    Nondeterminism in LLM Inference", 2025).

    Args:
        hidden: [rows, inner], contiguous; output: [rows, columns], contiguous.
        weight: [columns, inner] with the strides given.
        bias: [columns], if there is one.
    """
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(0, inner, INNER):
        at = start + tl.arange(0, INNER)
        left = tl.load(
            hidden + row[:, None] * inner + at[None, :], mask=(row < rows)[:, None] & (at < inner)[None, :], other=0.0
        )
        right = tl.load(
            weight + column[None, :] * column_stride + at[:, None] * inner_stride,
            mask=(column < columns)[None, :] & (at < inner)[:, None],
            other=0.0,
        )
        sums = tl.dot(left, right, sums, input_precision="tf32x3")
    if WITH_BIAS:
        sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + row[:, None] * columns + column[None, :],
        sums.to(output.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < columns)[None, :],
    )
