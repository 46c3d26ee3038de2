"""KV memory of the OpenVINO runner: pages of 32 positions, shared between regions that begin with the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from model_runner.errors import KVAllocationError
from model_runner.runners.base import KVMoves
from strategies.draft import Int32Array

PAGE = 32
"""Positions of a page: the block size of OpenVINO's PagedAttention on CPUs."""
_ELEMENTS = {"float32": (np.float32, ov.Type.f32), "bfloat16": (np.uint16, ov.Type.bf16)}
"""Dtype of the model: how NumPy and OpenVINO hold it. NumPy has no bfloat16; pages are only copied there."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of the keys and values of one token, the same in every layer.

    Attributes:
        dtype: "float32" or "bfloat16".
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        itemsize: int = np.dtype(_ELEMENTS[self.dtype][0]).itemsize
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * itemsize


class KVPages:
    """Implements `runners.base.KVStore`. A region is a list of pages.

    `copy` shares full pages by reference: a sequence writes only at and beyond its committed length, and no row below
    the committed length of a region is ever written again, so a shared page never changes.

    Attributes:
        keys: [layer, page, kv_head, PAGE, key_dim], of float32 or of the bits of bfloat16.
        values: [layer, page, kv_head, PAGE, value_dim], the same.

    Args:
        layout: what a token costs.
        capacity: tokens over all regions at most. The memory has room for twice as many, because the last page of a
            region may be almost empty: no set of regions of 16 tokens or more runs out of pages within its capacity.
            Pages that are never written cost nothing.

    Raises:
        KVAllocationError: the machine has no memory for it.
    """

    def __init__(self, layout: PageLayout, capacity: int) -> None:
        self.layout = layout
        pages = 2 * _pages(capacity)
        element = _ELEMENTS[layout.dtype][0]
        shape = (layout.layers, pages, layout.kv_heads, PAGE)
        try:
            self.keys: npt.NDArray[Any] = np.zeros((*shape, layout.key_dim), element)
            self.values: npt.NDArray[Any] = np.zeros((*shape, layout.value_dim), element)
        except MemoryError as error:
            raise KVAllocationError(capacity, capacity * layout.bytes_per_token) from error
        self._references = np.zeros(pages, np.int32)
        self._free = list(range(pages - 1, -1, -1))
        self._numbers = count()
        self._pages: dict[int, Int32Array] = {}
        self._sizes: dict[int, int] = {}

    @property
    def allocated_tokens(self) -> int:
        return sum(self._sizes.values())

    def allocate(self, tokens: int) -> int:
        needed = _pages(tokens)
        if needed > len(self._free):
            raise KVAllocationError(tokens, tokens * self.layout.bytes_per_token)
        number = next(self._numbers)
        pages = np.array([self._free.pop() for _ in range(needed)], np.int32)
        self._references[pages] = 1
        self._pages[number], self._sizes[number] = pages, tokens
        return number

    def free(self, region: int) -> None:
        del self._sizes[region]
        self._release(self._pages.pop(region))

    def copy(self, source: int, target: int, rows: int) -> None:
        """Makes the first `rows` rows of a region those of another one too: full pages are shared, the rest copied."""
        sources, targets = self._pages[source], self._pages[target]
        full = rows // PAGE
        self._references[sources[:full]] += 1
        self._release(targets[:full])
        targets[:full] = sources[:full]
        if rows % PAGE:
            for memory in (self.keys, self.values):
                memory[:, targets[full]] = memory[:, sources[full]]

    def move(self, moves: KVMoves) -> None:
        """Moves rows within their regions, in every layer."""
        sources, targets = self._pages_of(moves.regions, moves.sources), self._pages_of(moves.regions, moves.targets)
        for memory in (self.keys, self.values):
            memory[:, targets, :, moves.targets % PAGE] = memory[:, sources, :, moves.sources % PAGE]

    def pages(self, region: int, committed: int, end: int) -> Int32Array:
        """int32[p], the pages of rows 0 to `end` of a region, of which those from `committed` on are written next."""
        pages = self._pages[region][: _pages(end)]
        assert (self._references[pages[committed // PAGE :]] == 1).all(), "a shared page would be written"
        return pages

    def tensors(self) -> dict[str, ov.Tensor]:
        """The caches of each layer as inputs of the model, see `paged_attention.add_parameters`; no copies."""
        element = _ELEMENTS[self.layout.dtype][1]
        return {
            f"{name}_cache.{layer}": ov.Tensor(of_layer, ov.Shape(of_layer.shape), element)
            for name, memory in (("key", self.keys), ("value", self.values))
            for layer, of_layer in enumerate(memory)
        }

    def _pages_of(self, regions: Int32Array, rows: Int32Array) -> Int32Array:
        """int32[m], the page of each row in its region."""
        pairs = zip(regions.tolist(), (rows // PAGE).tolist(), strict=True)
        return np.array([self._pages[region][page] for region, page in pairs], np.int32)

    def _release(self, pages: Int32Array) -> None:
        self._references[pages] -= 1
        self._free.extend(pages[self._references[pages] == 0].tolist())


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
