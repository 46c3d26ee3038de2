"""Random steps, and attention over them in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from draftwood_benchmarks.gpu_sections import random_tree
from draftwood_model_runner.runners.base import KVShape, StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda.attention import STEP, AttentionStep, Scratch, paged_attention
from draftwood_model_runner.runners.cuda.device import Machine
from draftwood_model_runner.runners.cuda.memory import PAGE_SIZE, KVPages, StepArrays
from draftwood_model_runner.runners.cuda.tiling import LEVELS, Division, divide, divide_exactly

CPU = torch.device("cpu")


def random_batch(random: np.random.Generator, rows: list[tuple[int, int, int]], deep: float) -> tuple[StepBatch, int]:
    """A step of rows of (context, chain, nodes), whose pages lie anywhere; and how many pages there are."""
    tables = [-(-sum(row) // PAGE_SIZE) for row in rows]
    pages = sum(tables) + 3
    order = random.permutation(pages).astype(np.int32)
    laid, used = [], 0
    for (context, chain, nodes), table in zip(rows, tables, strict=True):
        tree = random_tree(random, nodes, deep)
        laid.append(BatchRow(order[used : used + table], context, np.zeros(chain, np.int32), tree, chain - 1))
        used += table
    return lay_out(laid), pages


def attention_in_float64(
    batch: StepBatch,
    shape: KVShape,
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[T, head, value_dim] of queries [T, head, key_dim]; keys and values of each row: [entry, kv_head, dim]."""
    out = torch.empty((*query.shape[:2], shape.value_dim), dtype=torch.float64, device=query.device)
    group = query.shape[1] // shape.kv_heads
    for row in range(batch.rows):
        context, begin = int(batch.context_lens[row]), int(batch.cu_seqlens[row])
        for i in range(int(batch.cu_seqlens[row + 1]) - begin):
            seen, at = [*range(context)], i
            while at >= 0:
                seen.append(context + at)
                at = int(batch.parents[begin + at])
            places = [entry if entry < context else int(batch.positions[begin + entry - context]) for entry in seen]
            if window is not None:
                position = int(batch.positions[begin + i])
                seen = [entry for entry, place in zip(seen, places, strict=True) if place > position - window]
            k = keys[row][seen].double().repeat_interleave(group, 1)
            v = values[row][seen].double().repeat_interleave(group, 1)
            scores = torch.einsum("hd,ehd->he", query[begin + i].double(), k) / math.sqrt(shape.key_dim)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            weights = torch.softmax(scores, 1)[:, : len(seen)]
            out[begin + i] = torch.einsum("he,ehd->hd", weights, v)
    return out


def _with_contexts(
    batch: StepBatch,
    shape: KVShape,
    memory: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    numbers: Callable[..., torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of each batch row, [entry, kv_head, dim]: of its context, which are drawn and written into KV
    memory [page, kv_head, page row, dim], and of its tokens."""
    keys, values = [], []
    for row in range(batch.rows):
        context, begin, end = int(batch.context_lens[row]), int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])
        old = numbers(context, shape.kv_heads, shape.key_dim), numbers(context, shape.kv_heads, shape.value_dim)
        table = batch.block_table[batch.cu_blocks[row] : batch.cu_blocks[row + 1]]
        for i, entry in enumerate(zip(*old, strict=True)):
            memory[int(table[i // PAGE_SIZE]), :, i % PAGE_SIZE] = torch.cat(entry, 1)
        keys.append(torch.cat([old[0], key[begin:end]]))
        values.append(torch.cat([old[1], value[begin:end]]))
    return keys, values


def attended(
    batch: StepBatch,
    pages: int,
    shape: KVShape,
    group: int,
    dtype: torch.dtype,
    random: np.random.Generator,
    *,
    many_rows: bool = False,
    programs: int = 3,
    capability: int = 90,
    padding: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    exact: bool = False,
    device: torch.device = CPU,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels compute, and what is right. Memory that is not written, or that no token may see, holds NaN."""

    def numbers(*size: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(size)).to(device=device, dtype=dtype)

    kv = KVPages((shape,), dtype, device, pages * PAGE_SIZE)
    kv.layers[0].fill_(math.nan)
    size = batch.size + padding
    query, key, value = (
        numbers(size, count, dim)
        for count, dim in (
            (group * shape.kv_heads, shape.key_dim),
            (shape.kv_heads, shape.key_dim),
            (shape.kv_heads, shape.value_dim),
        )
    )
    for tensor in (query, key, value):
        tensor[batch.size :] = math.nan
    keys, values = _with_contexts(batch, shape, kv.layers[0], key, value, numbers)
    rows = max(64 if many_rows else 16, 1 << (group - 1).bit_length())
    division = Division(rows // group, programs)
    tiles = divide_exactly(batch, division.tile) if exact else divide(batch, division)
    parts, words = tiles.parts.shape[0], tiles.ancestor_bitmask.shape[1]
    assert exact or parts <= division.most_parts(batch.size)
    arrays = StepArrays(size, words, parts, batch.block_table.size, device, LEVELS if exact else 0)
    arrays.fill(batch, tiles, size)
    scratch = Scratch((shape,), parts * rows, device)
    for memory in (scratch.sums, scratch.maxima, scratch.totals):
        memory.fill_(math.nan)
    layer: Any = torch.nn.Module()
    layer.layer_idx = 0
    with STEP.during(AttentionStep(kv, arrays, scratch, Machine(programs, capability), rows)):
        output, _ = paged_attention(
            layer,
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            None,
            sliding_window=window,
            softcap=softcap,
            s_aux=sinks,
        )
    assert (output[0, batch.size :] == 0).all()
    expected = attention_in_float64(batch, shape, query[: batch.size], keys, values, window, softcap, sinks)
    return output[0, : batch.size], expected
