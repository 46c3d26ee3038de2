"""What PagedAttention takes: pages of keys and values, and the inputs of a step with its mask among draft trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from draftwood_model_runner.runners.base import KVCompaction, KVShape, StepBatch
from draftwood_model_runner.runners.batch import count_chains
from draftwood_model_runner.runners.machine import allocated, by_layer, bytes_per_token
from draftwood_strategies.arrays import Int32Array, segment_sizes
from draftwood_strategies.native import compiled

UInt8Array = npt.NDArray[np.uint8]
PAGE_SIZE = 32
"""Tokens of a page: the block size of OpenVINO's PagedAttention on CPUs."""
_ELEMENTS = {"float32": (np.float32, ov.Type.f32), "bfloat16": (np.uint16, ov.Type.bf16)}
"""Dtype of the model: how NumPy and OpenVINO hold it. NumPy has no bfloat16; entries are only moved there."""

LONGEST = 4
"""Tokens of a chain that is split, at most. Two tokens take 0.56 to 0.94 of the time so, four 0.83 to 1.04, eight 0.95
to 1.04 and sixteen 0.99 to 1.28, with 1 to 32 sequences and contexts of 128 to 1,900 (110M, float32, AVX2)."""
ATTENTION_ROWS, TOKEN_ROWS = "attention_rows", "token_rows"


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What the keys and values of one token are.

    Attributes:
        shapes: for each layer.
        dtype: "float32" or "bfloat16".
    """

    shapes: tuple[KVShape, ...]
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.shapes, np.dtype(_ELEMENTS[self.dtype][0]).itemsize)


class KVPages:
    """The pages; `scheduling.kv_pool.KVPool` decides what is in them.

    Attributes:
        keys: for each layer [page, kv_head, PAGE_SIZE, key_dim], of float32 or of the bits of bfloat16.
        values: for each layer [page, kv_head, PAGE_SIZE, value_dim], the same.

    Args:
        layout: what a token costs.
        tokens: capacity, rounded up to full pages. Pages that are never written take no memory.

    Raises:
        InvalidValueError: the device has no memory for it.
    """

    def __init__(self, layout: PageLayout, tokens: int) -> None:
        self.layout = layout
        self.pages = -(-tokens // PAGE_SIZE)
        element = _ELEMENTS[layout.dtype][0]

        def empty(shape: KVShape, layers: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
            sizes = (layers, self.pages, shape.kv_heads, PAGE_SIZE)
            return np.zeros((*sizes, shape.key_dim), element), np.zeros((*sizes, shape.value_dim), element)

        arrays = allocated(layout.shapes, tokens, layout.bytes_per_token, empty)
        self._arrays = [array for pair in arrays.values() for array in pair]
        self.keys = by_layer(layout.shapes, {shape: keys for shape, (keys, _) in arrays.items()})
        self.values = by_layer(layout.shapes, {shape: values for shape, (_, values) in arrays.items()})
        self.move(KVCompaction(np.empty(0, np.int32), np.empty(0, np.int32), np.zeros(1, np.int32)))  # compiles

    def move(self, moves: KVCompaction) -> None:
        """Moves entries from slots to slots, in every layer."""
        for memory in self._arrays:
            _move(memory, moves.sources, moves.targets)

    def tensors(self) -> dict[str, ov.Tensor]:
        """The caches of each layer as inputs of the model, see `graph.add_parameters`; no copies."""
        element = _ELEMENTS[self.layout.dtype][1]
        return {
            f"{name}_cache.{layer}": ov.Tensor(of_layer, ov.Shape(of_layer.shape), element)
            for name, memory in (("key", self.keys), ("value", self.values))
            for layer, of_layer in enumerate(memory)
        }


@compiled
def _move(memory: npt.NDArray[Any], sources: Int32Array, targets: Int32Array) -> None:
    """One entry after the other: no slot is a target before it was read as a source, see `KVCompaction`."""
    layers, _, heads, size, dim = memory.shape
    for layer in range(layers):
        for i in range(sources.shape[0]):
            for head in range(heads):
                source = memory[layer, sources[i] // size, head, sources[i] % size]
                target = memory[layer, targets[i] // size, head, targets[i] % size]
                for at in range(dim):
                    target[at] = source[at]


def split_short_chains(batch: StepBatch) -> StepBatch:
    """The same tokens in more batch rows: one for each token of a chain of 2 to `LONGEST` tokens.

    PagedAttention has one kernel for rows of one token and another for rows of several. The second first lays out the
    keys and values of the whole context again, which takes as long as attending for several tokens. All keys and values
    of a step are written before any token attends, so token i of a chain can be a row with i more committed tokens. A
    tree must stay one row, since the ancestors of a node need not lie one after the other in the pages.

    The rows no longer stand for sequences, so the batch is for attention alone.
    """
    sizes, chains = segment_sizes(batch.cu_seqlens), np.empty(batch.rows, np.int32)
    count_chains(batch.parents, batch.cu_seqlens, chains)
    split = (chains == sizes) & (sizes > 1) & (sizes <= LONGEST)
    if not split.any():
        return batch
    counts = np.where(split, sizes, 1)
    rows = np.repeat(np.arange(batch.rows), counts)
    places = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    block_table, cu_blocks = _segments(batch.block_table, batch.cu_blocks, rows)
    return replace(
        batch,
        parents=np.where(np.repeat(split, sizes), np.int32(-1), batch.parents),
        cu_seqlens=np.cumsum([0, *np.where(split, 1, sizes)[rows]], dtype=np.int32),
        context_lens=(batch.context_lens[rows] + places).astype(np.int32),
        block_table=block_table,
        cu_blocks=cu_blocks,
        prompt_lens=None,
    )


def _segments(table: Int32Array, offsets: Int32Array, rows: npt.NDArray[np.int64]) -> tuple[Int32Array, Int32Array]:
    """The segments of some rows, one after the other, and their offsets."""
    sizes = segment_sizes(offsets)[rows]
    ends = np.cumsum([0, *sizes], dtype=np.int32)
    return table[np.arange(ends[-1]) + np.repeat(offsets[rows] - ends[:-1], sizes)], ends


def with_own_pages(batch: StepBatch) -> StepBatch:
    """The batch with a page that a sequence holds in place of each that it gave up: PagedAttention reads all pages, and
    masks what is behind the window."""
    freed = batch.block_table < 0
    if not freed.any():
        return batch
    held = np.flatnonzero(~freed)
    next_held = held[np.searchsorted(held, np.arange(freed.size))]
    return replace(batch, block_table=batch.block_table[next_held])


def step_inputs(batch: StepBatch) -> dict[str, npt.NDArray[Any]]:
    """The inputs of a converted model for one step, see `conversion.convert`; of integers of any size."""
    ends = batch.context_lens + batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
    mask, mask_offsets = tree_mask(batch.parents, batch.cu_seqlens)
    return {
        "input_ids": batch.tokens[:, None],
        "position_ids": batch.positions[:, None],
        "logit_rows": batch.logit_rows,
        "past_lens": batch.context_lens,
        "subsequence_begins": batch.cu_seqlens,
        "block_indices": batch.block_table,
        "block_indices_begins": batch.cu_blocks,
        "max_context_len": ends.max(),
        "qq_bias": mask,
        "qq_bias_begins": mask_offsets,
    }


def tree_mask(parents: Int32Array, cu_seqlens: Int32Array) -> tuple[UInt8Array, Int32Array]:
    """`qq_bias` and `qq_bias_begins` of PagedAttention for the trees of a `StepBatch`.

    A chain has no bytes in the mask: attention is causal then.
    """
    sizes, chains = segment_sizes(cu_seqlens), np.empty(cu_seqlens.shape[0] - 1, np.int32)
    count_chains(parents, cu_seqlens, chains)
    mask_offsets = np.zeros(cu_seqlens.shape[0], np.int32)
    np.cumsum(np.where(chains == sizes, 0, sizes * sizes), out=mask_offsets[1:])
    mask = np.zeros(mask_offsets[-1], np.uint8)
    _fill_masks(parents, cu_seqlens, mask_offsets, mask)
    return mask, mask_offsets


@compiled
def _fill_masks(parents: Int32Array, cu_seqlens: Int32Array, mask_offsets: Int32Array, mask: UInt8Array) -> None:
    for row in range(cu_seqlens.shape[0] - 1):
        if mask_offsets[row + 1] == mask_offsets[row]:
            continue
        n = cu_seqlens[row + 1] - cu_seqlens[row]
        for i in range(n):
            of_token = mask_offsets[row] + i * n
            parent = parents[cu_seqlens[row] + i]
            if parent >= 0:
                of_parent = mask_offsets[row] + parent * n
                for j in range(parent + 1):
                    mask[of_token + j] = mask[of_parent + j]
            mask[of_token + i] = 1


def paired(batch: StepBatch, inputs: dict[str, npt.NDArray[Any]], spare_page: int) -> dict[str, npt.NDArray[Any]]:
    """The inputs of a step for a model that `graph.pair_single_tokens` changed: single tokens are computed as pairs.

    Args:
        inputs: those of the model as it was converted.
        spare_page: holds the second tokens of sequences that end with their last page.
    """
    sizes = np.diff(batch.cu_seqlens)
    single = sizes == 1
    repeats = np.ones(batch.size, np.int32)
    repeats[batch.cu_seqlens[:-1][single]] = 2
    attention_rows = np.repeat(np.arange(batch.size, dtype=np.int32), repeats)
    token_rows = (np.cumsum(repeats) - repeats).astype(np.int32)
    cu_seqlens = np.zeros_like(batch.cu_seqlens)
    np.cumsum(sizes + single, out=cu_seqlens[1:])
    pages, cu_blocks = _with_spare_page(batch, single, spare_page)
    return inputs | {
        ATTENTION_ROWS: attention_rows,
        TOKEN_ROWS: token_rows,
        "subsequence_begins": cu_seqlens,
        "block_indices": pages,
        "block_indices_begins": cu_blocks,
        "max_context_len": np.array((batch.context_lens + sizes + single).max(), np.int32),
    }


def _with_spare_page(batch: StepBatch, single: npt.NDArray[np.bool_], spare_page: int) -> tuple[Int32Array, Int32Array]:
    """`block_table` and `cu_blocks`, with the spare page behind the pages of each full sequence of one token."""
    full = single & (batch.context_lens + 1 == PAGE_SIZE * np.diff(batch.cu_blocks))
    if not full.any():
        return batch.block_table, batch.cu_blocks
    pages = np.insert(batch.block_table, batch.cu_blocks[1:][full], spare_page).astype(np.int32)
    cu_blocks = batch.cu_blocks.copy()
    cu_blocks[1:] += np.cumsum(full, dtype=np.int32)
    return pages, cu_blocks
