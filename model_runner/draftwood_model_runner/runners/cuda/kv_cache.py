"""KV memory on a GPU: pages of 16 tokens, one tensor for all layers of a shape."""

from __future__ import annotations

from collections import Counter

import torch

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.runners.base import KVShape, by_layer

PAGE_SIZE = 16
"""Tokens of a page, vLLM's default: small, so that most of a short common prefix is in full pages."""


class KVPages:
    """The pages; `scheduling.kv_pool.KVPool` decides what is in them.

    Attributes:
        pages: their number.
        layers: for each layer [page, kv_head, PAGE_SIZE, key_dim + value_dim], the key of a token before its value.
        by_shape: the same, for each shape all of its layers: [layer, page, kv_head, PAGE_SIZE, key_dim + value_dim].

    Args:
        tokens: capacity, rounded up to full pages.

    Raises:
        InvalidValueError: the device has no memory for it.
    """

    def __init__(self, shapes: tuple[KVShape, ...], dtype: torch.dtype, device: torch.device, tokens: int) -> None:
        self.pages = -(-tokens // PAGE_SIZE)
        try:
            self.by_shape = {
                shape: torch.zeros(
                    (layers, self.pages, shape.kv_heads, PAGE_SIZE, shape.key_dim + shape.value_dim),
                    dtype=dtype,
                    device=device,
                )
                for shape, layers in Counter(shapes).items()
            }
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and so is what the CPU raises
            gigabytes = tokens * bytes_per_token(shapes, dtype) / 1e9
            raise InvalidValueError(
                "kv_cache_tokens", tokens, f"the device has no memory for their {gigabytes:.1f} GB of keys and values"
            ) from error
        self.layers: list[torch.Tensor] = by_layer(shapes, self.by_shape)


def bytes_per_token(shapes: tuple[KVShape, ...], dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes) * dtype.itemsize
