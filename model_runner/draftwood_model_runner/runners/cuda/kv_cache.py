"""KV memory on a GPU: pages of 16 tokens, one tensor for all layers of a shape."""

from __future__ import annotations

import torch

from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.capacity.kv_arrays import allocated, by_layer, bytes_per_token

PAGE_SIZE = 16
"""Tokens of a page, vLLM's default: small, so that most of a short common prefix is in full pages."""


class KVPages:
    """The pages; `scheduling.kv_pool.KVPool` decides what is in them.

    Attributes:
        pages: their number.
        layers: by number of each layer that attends [page, kv_head, PAGE_SIZE, key_dim + value_dim], the key of a token
            before its value.
        by_shape: the same, for each shape all of its layers: [layer, page, kv_head, PAGE_SIZE, key_dim + value_dim].

    Args:
        tokens: capacity, rounded up to full pages.
        numbers: of the layers; None if all attend.

    Raises:
        InvalidValueError: the device has no memory for it.
    """

    def __init__(
        self,
        shapes: tuple[KVShape, ...],
        dtype: torch.dtype,
        device: torch.device,
        tokens: int,
        numbers: tuple[int, ...] | None = None,
    ) -> None:
        self.pages = -(-tokens // PAGE_SIZE)

        def empty(shape: KVShape, layers: int) -> torch.Tensor:
            sizes = (layers, self.pages, shape.kv_heads, PAGE_SIZE, shape.key_dim + shape.value_dim)
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.by_shape = allocated(shapes, tokens, bytes_per_token(shapes, dtype.itemsize), empty)
        self.layers: dict[int, torch.Tensor] = dict(
            zip(range(len(shapes)) if numbers is None else numbers, by_layer(shapes, self.by_shape), strict=True)
        )
