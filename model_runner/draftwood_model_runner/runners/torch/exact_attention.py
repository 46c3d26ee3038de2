"""Exact attention: its order of summation depends on absolute positions alone, so outputs are bit-identical with and
without drafts, in any batch, after any preemption.

A draft and plain decoding differ in the row of a key: its position, or a later row among the other branches of the
draft. Here positions form blocks of `SUM_BLOCK` tokens, and a query sums in two parts: over all full blocks before its
own, where every key is in the row of its position; and over the tail from the start of its own block, where keys that
it must not attend to have the weight 0. A matrix product adds its terms one by one in the order of the keys, as long as
they fit one block of its kernel, and adding 0 changes nothing. So both ways give the same bits, if a draft does not
cross the end of the block that it begins in, and the tail is not too long (see `draft_limits`). Scores and sums are
float32 for every dtype of the model.

No library documents that its kernels behave so: `probe` tries it on the machine at hand.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import pad

from draftwood_model_runner.runners.base import DraftLimits
from draftwood_strategies.arrays import Int32Array

SUM_BLOCK = 128
"""Positions of a block; a multiple of the number of floats in any vector register."""
_LONGEST_TAIL = 192
"""Keys that a matrix product adds one by one: the smallest block of oneMKL in float32, found by trying lengths."""
ONES = 8
"""Columns of ones beside the values; eight keep rows aligned."""
_LEAST_ROWS, _LEAST_KEYS, _LEAST_SIZE = 4, 16, 200
"""Products with fewer rows, columns or rows x columns take other kernels, which sum in another order. Found by
`tests/model_runner/runners/test_exact.py` on CPUs with AVX2 and AVX-512."""
_SHARED_ROWS = 16
"""Rows of a product that several threads share are divided between them; each must get enough, as above."""


def draft_limits(position: int) -> DraftLimits:
    """What draft tree exact attention computes under the token at `position`."""
    into_block = position % SUM_BLOCK
    return DraftLimits(max_depth=SUM_BLOCK - 1 - into_block, max_nodes=_LONGEST_TAIL - 1 - into_block)


def block_of(position: int) -> int:
    """The first position of the block that a position lies in."""
    return position // SUM_BLOCK * SUM_BLOCK


def pieces(positions: Int32Array) -> list[slice]:
    """Runs of rows whose positions, int32[n], share a block.

    Only the chain at the beginning of a batch row can cross into another block, and its tokens are in the rows of
    their positions.
    """
    n = positions.shape[0]
    if n == 1:
        return [slice(0, 1)]
    bounds = [0, *(np.flatnonzero(np.diff(positions // SUM_BLOCK)) + 1).tolist(), n]
    return [slice(start, end) for start, end in pairwise(bounds)]


def attend_exactly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    position: int,
    first: int,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of rows whose positions share a block.

    Args:
        query: [head, q, key_dim].
        keys: float32 [kv_head, at least `_LEAST_KEYS`, key_dim]; the rows are `start` to `start + q`.
        values: float32 [kv_head, ..., value_dim + ONES], its last columns 1: so the product with the weights also
            has their sum, added up in the same order.
        start: the row of the first query in `keys`.
        position: its absolute position.
        first: the position of the first key: one that all queries of a block of positions are given alike.
        mask: [q, start + q], 0 or -inf; None where all queries see all keys.
        sinks: [head], take part in the softmax only.

    Returns:
        [q, head, value_dim], of the query's dtype.
    """
    heads, count, dim = query.shape
    kv_heads, last, tail = keys.shape[0], start + count, block_of(position) - first
    rows = _padded(count, heads // kv_heads, values.shape[2], alone=kv_heads >= torch.get_num_threads())
    width = max(last, _LEAST_KEYS)
    if rows > count:
        query = pad(query, (0, 0, 0, rows - count))
    if last < width:
        keys[:, last:width] = 0.0
    scores = torch.bmm(query.float().reshape(kv_heads, -1, dim), keys[:, :width].transpose(1, 2))
    scores *= 1 / math.sqrt(dim) if scaling is None else scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores.view(heads, rows, width)[:, :count, :last] += mask
    if last < width:
        scores[..., last:] = -math.inf
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().repeat_interleave(rows).view(kv_heads, -1, 1)
        highest = torch.maximum(highest, sink)
    weights = scores.sub_(highest).exp_()
    sums = torch.bmm(weights[..., tail:last], values[:, tail:last])
    if tail:
        sums += torch.bmm(weights[..., :tail], values[:, :tail])
    total = sums[..., -1:]
    if sinks is not None:
        total = total + torch.exp(sink - highest)
    output = sums[..., :-ONES] / total
    return output.view(heads, rows, -1)[:, :count].transpose(0, 1).to(query.dtype)


def _padded(count: int, group: int, columns: int, alone: bool) -> int:
    """Rows a head for `count` queries, where products have `group` heads' rows and at least so many columns.

    Args:
        alone: each product has a thread of its own.
    """
    needed = max(_LEAST_ROWS, -(-_LEAST_SIZE // columns))
    rows = max(count, -(-needed // group))
    if alone:
        return rows
    step = _SHARED_ROWS // math.gcd(group, _SHARED_ROWS)
    return -(-rows // step) * step
