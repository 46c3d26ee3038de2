"""KV memory of the OpenVINO runner: pages of 32 tokens, in the layout of its PagedAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from draftwood_model_runner.runners.base import KVCompaction, KVShape
from draftwood_model_runner.runners.capacity.kv_arrays import allocated, by_layer, bytes_per_token
from draftwood_strategies.draft import Int32Array
from draftwood_strategies.native import compiled

PAGE_SIZE = 32
"""Tokens of a page: the block size of OpenVINO's PagedAttention on CPUs."""
_ELEMENTS = {"float32": (np.float32, ov.Type.f32), "bfloat16": (np.uint16, ov.Type.bf16)}
"""Dtype of the model: how NumPy and OpenVINO hold it. NumPy has no bfloat16; entries are only moved there."""


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
        """The caches of each layer as inputs of the model, see `paged_attention.add_parameters`; no copies."""
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
