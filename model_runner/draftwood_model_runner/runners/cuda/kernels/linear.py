"""A linear layer whose every output is summed up in one order, whatever the number of rows."""

from __future__ import annotations

import triton
import triton.language as tl


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
