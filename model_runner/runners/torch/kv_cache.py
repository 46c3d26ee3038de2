"""Keys and values of sequences: one contiguous slab each, so that attention needs no gathers."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from model_runner.errors import InvalidValueError
from model_runner.runners.torch.exact_attention import ONES
from model_runner.runners.torch.machine import free_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token costs: the shape of its keys and values, the same in every layer.

    Attributes:
        dtype: what keys and values are stored in; float32 where `exact`.
        exact: attention sums in the order of `exact_attention`.
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
        """Columns of stored values: exact attention wants some of ones beside them."""
        return self.value_dim + (ONES if self.exact else 0)


@dataclass(eq=False, slots=True)
class Slab:
    """One sequence's keys and values.

    Attributes:
        keys: [layer, kv_head, token, key_dim]; rows at and after the sequence's committed length are scratch space
            for the step's tree.
        values: [layer, kv_head, token, value_width].
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, layout: KVLayout, tokens: int) -> Slab:
        """A slab of `tokens` tokens, its keys and values undefined."""
        shape = (layout.layers, layout.kv_heads, tokens)
        keys = _empty((*shape, layout.key_dim), layout)
        values = _empty((*shape, layout.value_width), layout)
        values[..., layout.value_dim :] = 1.0
        return cls(keys, values)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def copy_rows(self, source: Slab, rows: int) -> None:
        """Takes over the first `rows` rows of another slab, in every layer."""
        self.keys[:, :, :rows] = source.keys[:, :, :rows]
        self.values[:, :, :rows] = source.values[:, :, :rows]

    def keep(self, committed: int, rows: SequenceOf[int]) -> None:
        """Moves rows `committed + rows[i]` to `committed + i`, in every layer; `rows` grow strictly."""
        in_place = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if in_place == len(rows):
            return
        source = np.array(rows[in_place:]) + committed
        target = slice(committed + in_place, committed + len(rows))
        for rows_of in (_plain(self.keys), _plain(self.values)):
            rows_of[:, :, target] = rows_of[:, :, source]


def _plain(tensor: torch.Tensor) -> Any:
    """A CPU tensor as the NumPy array that it is, which takes a third of the time to index; others as they are."""
    if tensor.device.type != "cpu":
        return tensor
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy()


def _empty(shape: tuple[int, ...], layout: KVLayout) -> torch.Tensor:
    """A tensor that on a CPU is a mapping of its own: freed, it goes back to the system at once.

    On the heap, slabs that come and go in many sizes leave holes between what else is there, of a multiple of their
    own size.
    """
    if layout.device.type != "cpu":
        return torch.empty(shape, dtype=layout.dtype, device=layout.device)
    size = math.prod(shape) * layout.dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=layout.dtype).view(shape)


def default_capacity(layout: KVLayout, context: int, sequences: int) -> int:
    """Tokens for `sequences` whole contexts, or for as many as fit a share of the device's free memory.

    Raises:
        InvalidValueError: not even one fits.
    """
    share = 0.8 if layout.device.type == "cuda" else 0.5
    affordable = int(share * free_bytes(layout.device)) // layout.bytes_per_token
    if affordable < context:
        gigabytes = context * layout.bytes_per_token / 1e9
        raise InvalidValueError(
            "max_context",
            context,
            f"keys and values of one context take {gigabytes:.1f} GB, for which memory does not suffice; at most"
            f" {affordable} tokens fit {share:.0%} of what is free, and kv_cache_tokens can set another limit",
        )
    return min(sequences * context, affordable)


class KVCache:
    """Hands out slabs and takes them back, within a capacity in tokens.

    A returned slab is kept for the next one of its size: fresh memory costs a page fault for every 4 KiB that is first
    written. Kept ones go when the capacity is needed for another size. `kv_pool.KVPool` decides who gets one.

    Args:
        layout: what a token costs.
        capacity: tokens over all slabs, those handed out and those kept.
    """

    def __init__(self, layout: KVLayout, capacity: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.tokens_out = 0
        self._kept: list[Slab] = []

    def take(self, tokens: int) -> Slab:
        """A slab of `tokens` tokens, its contents undefined. The caller keeps within the capacity."""
        assert self.tokens_out + tokens <= self.capacity
        self.tokens_out += tokens
        for i, slab in enumerate(self._kept):
            if slab.capacity == tokens:
                return self._kept.pop(i)
        while self._kept and self.tokens_out + sum(slab.capacity for slab in self._kept) > self.capacity:
            self._kept.pop(0)
        return Slab.empty(self.layout, tokens)

    def give_back(self, slab: Slab) -> None:
        self.tokens_out -= slab.capacity
        self._kept.append(slab)
