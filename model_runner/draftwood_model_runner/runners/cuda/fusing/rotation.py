"""The rotary embedding of queries and keys in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftwood_model_runner.runners.cuda.device.launching import launch
from draftwood_model_runner.runners.cuda.fusing.trying import agree
from draftwood_model_runner.runners.cuda.kernels.fused import rotate
from draftwood_model_runner.runners.cuda.steps.attention import STEP, power_of_2, with_rows

_NAME = "apply_rotary_pos_emb"


def fuse_rotation(file: Any) -> bool:
    """Replaces the rotation of a file of transformers, whose models share it: within steps only."""
    original = getattr(file, _NAME, None)
    if original is None:
        return False
    if not hasattr(original, "unfused"):
        setattr(file, _NAME, _rotation(original))
    return True


def _rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    agrees: dict[tuple[torch.dtype, int], bool] = {}

    def rotated(q: Any, k: Any, cos: Any, sin: Any, *arguments: Any, **options: Any) -> Any:
        """Query and key [1, head, T, size], rotated by cos and sin [1, T, size]."""
        usual = not arguments and not options and q.dim() == 4 and cos.dim() == 3 and q.shape[0] == 1
        if STEP.get(None) is None or not usual or cos.shape[-1] != q.shape[-1] or cos.dtype != q.dtype:
            return original(q, k, cos, sin, *arguments, **options)
        kind = (q.dtype, q.shape[-1])
        if kind not in agrees:
            samples = [torch.randn(1, heads, 3, q.shape[-1], dtype=q.dtype, device=q.device) for heads in (4, 2)]
            angles = [torch.rand(1, 3, q.shape[-1], dtype=q.dtype, device=q.device) for _ in range(2)]
            agrees[kind] = agree(fused_rotation, original, *samples, *angles)
        return (fused_rotation if agrees[kind] else original)(q, k, cos, sin)

    rotated.unfused = original  # type: ignore[attr-defined]
    return rotated


def fused_rotation(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [1, head, T, size] and keys [1, kv_head, T, size], rotated by cosines and sines [1, T, size]."""
    query, key = with_rows(query), with_rows(key)
    _, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
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
