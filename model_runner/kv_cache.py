"""Keys and values of live sequences: one contiguous slab each, so that attention needs no gathers."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token costs: the shape of its keys and values, the same in every layer."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class Slab:
    """One sequence's keys and values.

    Attributes:
        keys: [layer, kv_head, token, key_dim]; rows at and after the sequence's committed length are scratch space
            for the step's tree.
        values: [layer, kv_head, token, value_dim].
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def keep(self, committed: int, rows: SequenceOf[int]) -> None:
        """Moves rows `committed + rows[i]` to `committed + i`, in every layer; `rows` grow strictly."""
        in_place = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if in_place == len(rows):
            return
        source = torch.tensor(rows[in_place:], device=self.keys.device) + committed
        target = slice(committed + in_place, committed + len(rows))
        self.keys[:, :, target] = self.keys[:, :, source]
        self.values[:, :, target] = self.values[:, :, source]


class KVCache:
    """Hands out slabs and takes them back, within a capacity in tokens.

    A returned slab is kept for the next sequence that it fits: fresh memory costs a page fault for every 4 KiB that
    is first written. Kept ones go when the capacity is needed for another size.

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
        shape = (self.layout.layers, self.layout.kv_heads, tokens)
        return Slab(
            torch.empty(*shape, self.layout.key_dim, dtype=self.layout.dtype, device=self.layout.device),
            torch.empty(*shape, self.layout.value_dim, dtype=self.layout.dtype, device=self.layout.device),
        )

    def give_back(self, slab: Slab) -> None:
        self.tokens_out -= slab.capacity
        self._kept.append(slab)

    def discard(self, slab: Slab) -> None:
        """As `give_back`, for a slab of a size that no sequence will ask for."""
        self.tokens_out -= slab.capacity
