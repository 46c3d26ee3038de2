"""KV memory of the torch runner: one contiguous region of keys and values for each sequence."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from model_runner.errors import KVAllocationError
from model_runner.runners.base import KVMoves
from model_runner.runners.torch.exact_attention import ONES


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the keys and values of one token, the same in every layer.

    Attributes:
        dtype: of stored keys and values; float32 if `exact`.
        exact: attention sums in the order that `exact_attention` describes.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    exact: bool = False

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * (self.key_dim + self.value_width) * self.dtype.itemsize

    @property
    def value_width(self) -> int:
        """Columns of stored values: exact attention needs some columns of ones beside them."""
        return self.value_dim + (ONES if self.exact else 0)


@dataclass(eq=False, slots=True)
class KVRegion:
    """Keys and values of one sequence, contiguous, so that attention gathers nothing.

    Attributes:
        keys: [layer, kv_head, token, key_dim]; rows at and after the committed length are scratch space for the tree
            of the step.
        values: [layer, kv_head, token, value_width].
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, layout: KVLayout, tokens: int) -> KVRegion:
        """A region of `tokens` tokens, its keys and values undefined."""
        shape = (layout.layers, layout.kv_heads, tokens)
        keys = _empty((*shape, layout.key_dim), layout)
        values = _empty((*shape, layout.value_width), layout)
        values[..., layout.value_dim :] = 1.0
        return cls(keys, values)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def copy_rows(self, source: KVRegion, rows: int) -> None:
        """Takes over the first `rows` rows of another region, in every layer."""
        self.keys[:, :, :rows] = source.keys[:, :, :rows]
        self.values[:, :, :rows] = source.values[:, :, :rows]

    def move_rows(self, sources: npt.NDArray[np.intp], targets: npt.NDArray[np.intp]) -> None:
        """Moves rows `sources`, intp[m], to rows `targets`, in every layer."""
        for rows_of in (_plain(self.keys), _plain(self.values)):
            rows_of[:, :, targets] = rows_of[:, :, sources]


def _plain(tensor: torch.Tensor) -> Any:
    """A CPU tensor as a NumPy view, which takes a third of the time to index; other tensors as they are."""
    if tensor.device.type != "cpu":
        return tensor
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy()


def _empty(shape: tuple[int, ...], layout: KVLayout) -> torch.Tensor:
    """A tensor that on a CPU is a memory mapping of its own, which returns to the system as soon as it is freed.

    On the heap, regions of many sizes that come and go fragment memory to several times their own size.
    """
    if layout.device.type != "cpu":
        return torch.empty(shape, dtype=layout.dtype, device=layout.device)
    size = math.prod(shape) * layout.dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=layout.dtype).view(shape)


class KVCache:
    """Allocates KV regions; `scheduling.kv_pool.KVPool` decides what for. Implements `runners.base.KVStore`.

    A freed region is kept for the next one of its size: fresh memory costs a page fault for every 4 KiB that is first
    written. What is kept and what is allocated never exceed `capacity` together.

    Args:
        layout: what a token costs.
        capacity: tokens over all regions, allocated and kept.
    """

    def __init__(self, layout: KVLayout, capacity: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self._numbers = count()
        self._regions: dict[int, KVRegion] = {}
        self._allocated = 0
        self._kept: list[KVRegion] = []

    @property
    def allocated_tokens(self) -> int:
        return self._allocated

    def region(self, number: int) -> KVRegion:
        return self._regions[number]

    def allocate(self, tokens: int) -> int:
        region = self._reused(tokens)
        if region is None:
            self._drop_kept(self.capacity - self._allocated - tokens)
            region = self._new(tokens)
        number = next(self._numbers)
        self._regions[number] = region
        self._allocated += tokens
        return number

    def free(self, region: int) -> None:
        freed = self._regions.pop(region)
        self._allocated -= freed.capacity
        self._kept.append(freed)
        self._drop_kept(self.capacity - self._allocated)

    def copy(self, source: int, target: int, rows: int) -> None:
        self._regions[target].copy_rows(self._regions[source], rows)

    def move(self, moves: KVMoves) -> None:
        """Moves rows within their regions, in every layer."""
        for number in dict.fromkeys(moves.regions.tolist()):
            rows = moves.regions == number
            self._regions[number].move_rows(moves.sources[rows].astype(np.intp), moves.targets[rows].astype(np.intp))

    def _reused(self, tokens: int) -> KVRegion | None:
        at = next((i for i, region in enumerate(self._kept) if region.capacity == tokens), None)
        return None if at is None else self._kept.pop(at)

    def _new(self, tokens: int) -> KVRegion:
        try:
            return KVRegion.empty(self.layout, tokens)
        except (MemoryError, OSError, RuntimeError) as error:  # RuntimeError: torch, out of memory on either device
            self._kept.clear()
            try:
                return KVRegion.empty(self.layout, tokens)
            except (MemoryError, OSError, RuntimeError):
                raise KVAllocationError(tokens, tokens * self.layout.bytes_per_token) from error

    def _drop_kept(self, most: int) -> None:
        """Drops kept regions, those freed longest ago first, until at most `most` tokens are kept."""
        while self._kept and sum(region.capacity for region in self._kept) > most:
            self._kept.pop(0)
