"""The small operations of a layer, several in one kernel; rounded wherever the operations that they replace round."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    hidden, weight, output, epsilon, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, SHIFTED: tl.constexpr
):
    """Root mean square norm (Zhang and Sennrich, 2019) of each row: one program for each.

    Args:
        hidden: [row, SIZE] with the row stride given; output: [row, SIZE].
        weight: [SIZE]; with SHIFTED, 1 is added to it and the product is not rounded before (Gemma).
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    values = tl.load(hidden + row * row_stride + at, mask=at < SIZE, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    normed = normed * (scale + 1.0) if SHIFTED else normed.to(output.dtype.element_ty).to(tl.float32) * scale
    tl.store(output + row * SIZE + at, normed.to(output.dtype.element_ty), mask=at < SIZE)


@triton.jit
def silu_product(gate, up, output, count, BLOCK: tl.constexpr):
    """silu(gate) * up, for `count` numbers that lie side by side."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    opened = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    opened = (opened / (1.0 + tl.exp(-opened))).to(output.dtype.element_ty).to(tl.float32)
    product = opened * tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(output + at, product.to(output.dtype.element_ty), mask=at < count)


@triton.jit
def rotate(
    hidden, cosines, sines, output, token_stride, head_stride, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotary position embedding (Su et al., 2021) of halves: one program for each token.

    Args:
        hidden: [token, HEADS, 2 * HALF] with the strides given, the last one 1.
        cosines, sines: [token, 2 * HALF].
        output: [token, HEADS, 2 * HALF].
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    there = (heads < HEADS) & (dims < HALF)
    kind = output.dtype.element_ty
    source = hidden + token * token_stride + heads * head_stride + dims
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
