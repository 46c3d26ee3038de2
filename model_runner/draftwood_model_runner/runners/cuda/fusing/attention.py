"""Attention whose queries, keys and values are one product, and whose rotary embedding is one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draftwood_model_runner.runners.cuda.device.launching import launch
from draftwood_model_runner.runners.cuda.fusing.linears import ParallelLinears
from draftwood_model_runner.runners.cuda.kernels.fused import rotate
from draftwood_model_runner.runners.cuda.steps.attention import paged_attention, power_of_2, with_rows


class FusedAttention:
    """The attention of a layer, see `families.Fusions.attention`.

    Args:
        options: what its own forward passes to attention functions, such as `scaling` and `sliding_window`.
        join: queries, keys and values may be one product.
    """

    def __init__(self, attention: Any, options: Mapping[str, Any], join: bool) -> None:
        self._attention, self._options = attention, options
        self._normed = hasattr(attention, "q_norm")
        self.products = ParallelLinears([attention.q_proj, attention.k_proj, attention.v_proj], join)

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """[1, T, size] of [1, T, size], and no weights; within a step.

        Args:
            position_embeddings: cosines and sines [1, T, head_size].
        """
        shape = (*hidden_states.shape[:-1], -1, self._attention.head_dim)
        query, key, value = (part.view(shape) for part in self.products(hidden_states))
        if self._normed:
            query, key = self._attention.q_norm(query), self._attention.k_norm(key)
        query, key = fused_rotation(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        output, _ = paged_attention(self._attention, query, key, value.transpose(1, 2), None, **self._options)
        return self._attention.o_proj(output.flatten(2)), None


def fused_rotation(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [1, head, T, size] and keys [1, kv_head, T, size], rotated by cosines and sines [1, T, size].

    Raises:
        ValueError: the angles are for heads of another size, or of another dtype.
    """
    query, key = with_rows(query), with_rows(key)
    _, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    if cosines.shape != (1, tokens, size) or cosines.dtype != query.dtype:
        raise ValueError(f"{cosines.dtype}{[*cosines.shape]} cosines for {query.dtype}{[*query.shape]} queries")
    queries, keys = (query.new_empty((tokens, count, size)) for count in (heads, kv_heads))
    launch(
        rotate,
        (tokens, 2),
        *(query, key, cosines.contiguous(), sines.contiguous(), queries, keys),
        *(query.stride(2), query.stride(1), key.stride(2), key.stride(1)),
        HEADS=heads,
        HEADS_BLOCK=power_of_2(heads),
        KV_HEADS=kv_heads,
        KV_HEADS_BLOCK=power_of_2(kv_heads),
        HALF=size // 2,
        BLOCK=power_of_2(size // 2),
    )
    return queries.transpose(0, 1)[None], keys.transpose(0, 1)[None]
