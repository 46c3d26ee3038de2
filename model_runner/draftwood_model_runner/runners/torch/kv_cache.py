"""KV memory of the torch runner: pages of 16 tokens, in one array for all layers of a shape."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from draftwood_model_runner.runners.base import KVCompaction, KVShape, StepBatch
from draftwood_model_runner.runners.machine import allocated, by_layer, bytes_per_token, state_capacity
from draftwood_model_runner.runners.recurrent_layers import RecurrentLayer
from draftwood_model_runner.runners.torch.exact_attention import ONES
from draftwood_model_runner.runners.torch.states import StateMemory
from draftwood_strategies.arrays import Int32Array

PAGE_SIZE = 16
"""Tokens of a page, vLLM's default: small, so that most of a short common prefix is in full pages."""


class LayerParts(NamedTuple):
    """Where a cache layer keeps what it is given: an index into `KVLayout.shapes` for each part it has.

    Attributes:
        states: of keys and values; None for a layer that keeps none.
        indexer: of the keys of a sparse attention's indexer.
        compressed: of what a compressor averages, by the name that the model gives it.
        window: tokens of each average.
    """

    states: int | None
    indexer: int | None = None
    compressed: tuple[tuple[str, int], ...] = ()
    window: int = 0


@dataclass(frozen=True, slots=True)
class ModelCache:
    """How a model that attends in code of its own is computed: one batch row at a time, with its own attention.

    Attributes:
        layers: of its cache.
        tree_masks: None: it makes its masks itself, which are right for chains only. "one": it takes a mask [1, 1, T,
            entries] as `attention_mask`. "by kind": it takes a mask for each type of layer.
    """

    layers: tuple[LayerParts, ...]
    tree_masks: str | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What the keys and values of one token are.

    Attributes:
        shapes: for each call of attention, in their order.
        dtype: of stored keys and values; float32 if `exact`.
        exact: attention sums in the order that `exact_attention` describes.
        own: the model attends in code of its own, over this cache; None if it calls `attention.tree_attention`.
        window: entries that any token attends to at most: the last ones, its own included; None for all.
        recurrent layers: the layers that carry a state from token to token instead, or besides.
        branches: drafts may be trees; if not, chains only.
        state_bytes: of the states of a sequence after a token.
    """

    shapes: tuple[KVShape, ...]
    dtype: torch.dtype
    device: torch.device
    exact: bool = False
    model_cache: ModelCache | None = None
    window: int | None = None
    recurrent_layers: tuple[RecurrentLayer, ...] = ()
    branches: bool = True
    state_bytes: int = 0

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of states: a step has those before it and those after it."""
        return 2 * self.state_bytes

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.shapes, self.dtype.itemsize, ONES if self.exact else 0)

    def value_width(self, shape: KVShape) -> int:
        """Columns of stored values: exact attention needs some columns of ones beside them."""
        return shape.value_dim + (ONES if self.exact else 0)


class KVCache:
    """The pages; `scheduling.kv_pool.KVPool` decides what is in them.

    Attributes:
        keys: for each layer [kv_head, page * PAGE_SIZE, key_dim].
        values: for each layer [kv_head, page * PAGE_SIZE, value_width].
        states: those of the layout's recurrent layers; None without recurrent layers.

    Args:
        layout: what a token costs.
        tokens: capacity, rounded up to full pages.

    Raises:
        InvalidValueError: the device has no memory for it.
    """

    def __init__(self, layout: KVLayout, tokens: int) -> None:
        self.layout = layout
        self.pages = -(-tokens // PAGE_SIZE)
        slots = self.pages * PAGE_SIZE

        def empty(shape: KVShape, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
            sizes = (layers, shape.kv_heads, slots)
            return _empty((*sizes, shape.key_dim), layout), _empty((*sizes, layout.value_width(shape)), layout)

        arrays = allocated(layout.shapes, tokens, layout.bytes_per_token, empty)
        self._arrays = [_plain(array) for pair in arrays.values() for array in pair if array.numel()]
        self.keys = by_layer(layout.shapes, {shape: keys for shape, (keys, _) in arrays.items()})
        self.values = by_layer(layout.shapes, {shape: values for shape, (_, values) in arrays.items()})
        self.states = _state_memory(layout, tokens * layout.bytes_per_token) if layout.recurrent_layers else None

    def move(self, moves: KVCompaction) -> None:
        """Moves entries from slots to slots, in every layer."""
        sources, targets = moves.sources.astype("int64"), moves.targets.astype("int64")
        for memory in self._arrays:
            memory[:, :, targets] = memory[:, :, sources]
        if self.states is not None:
            self.states.move(moves)


class StepEntries:
    """Where the entries of a step are in a `KVCache`: those that it writes, and those that its rows read.

    Args:
        kv: the memory.
        batch: the step.
    """

    def __init__(self, kv: KVCache, batch: StepBatch) -> None:
        self._kv = kv
        self._written = torch.from_numpy(batch.slot_mapping(PAGE_SIZE)).to(kv.layout.device)
        ends = (batch.context_lens + batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist()
        tables = batch.cu_blocks.tolist()
        self._tables = [
            batch.block_table[begin : begin + -(-end // PAGE_SIZE)] for begin, end in zip(tables, ends, strict=False)
        ]
        self._places: dict[tuple[int, int], slice | torch.Tensor] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys [kv_head, T or more, key_dim] and values [kv_head, T or more, value_dim] of a layer."""
        layout, size = self._kv.layout, self._written.shape[0]
        if layout.exact:
            values = torch.nn.functional.pad(values, (0, ONES), value=1.0)
        self._kv.keys[layer].index_copy_(1, self._written, keys[:, :size].to(layout.dtype))
        self._kv.values[layer].index_copy_(1, self._written, values[:, :size].to(layout.dtype))

    def read(self, layer: int, row: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [kv_head, at least context + T_s - first, key_dim] and values [..., value_width] of a batch row, in the
        order of its entries: in place where its pages are neighbours, otherwise a copy.

        Args:
            first: the entry to begin with, the first one of a page.
        """
        where = self._places.get((row, first))
        if where is None:
            pages = self._tables[row][first // PAGE_SIZE :]
            where = self._places[row, first] = _run_or_table(pages, self._kv.layout.device)
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        if isinstance(where, slice):
            return keys[:, where], values[:, where]
        return _gathered(keys, where), _gathered(values, where)


def _state_memory(layout: KVLayout, kv_bytes: int) -> StateMemory:
    sequences, kept = state_capacity(max(1, layout.bytes_per_sequence), kv_bytes, layout.device)
    return StateMemory(PAGE_SIZE, kept, sequences, layout.bytes_per_sequence)


def _run_or_table(pages: Int32Array, device: torch.device) -> slice | torch.Tensor:
    """The slots of pages int32[p] that are neighbours, otherwise the page table int64[p]."""
    first, count = int(pages[0]), pages.shape[0]
    assert first >= 0, "a page that was given up"
    if int(pages[-1]) - first == count - 1 and (pages[1:] - pages[:-1] == 1).all():
        return slice(first * PAGE_SIZE, (first + count) * PAGE_SIZE)
    return torch.from_numpy(pages.astype("int64")).to(device)


def _gathered(memory: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[kv_head, p * PAGE_SIZE, size] of a layer's [kv_head, slots, size] and a page table int64[p]."""
    heads, slots, size = memory.shape
    paged = memory.view(heads, slots // PAGE_SIZE, PAGE_SIZE * size)
    return paged.index_select(1, pages).view(heads, pages.shape[0] * PAGE_SIZE, size)


def _plain(tensor: torch.Tensor) -> Any:
    """A CPU tensor as a NumPy view, which takes a third of the time to index; other tensors as they are."""
    if tensor.device.type != "cpu":
        return tensor
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy()


def _empty(shape: tuple[int, ...], layout: KVLayout) -> torch.Tensor:
    """A tensor that on a CPU is a memory mapping of its own, of which only what is written takes memory."""
    if layout.device.type != "cpu" or 0 in shape:
        return torch.empty(shape, dtype=layout.dtype, device=layout.device)
    size = math.prod(shape) * layout.dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=layout.dtype).view(shape)
