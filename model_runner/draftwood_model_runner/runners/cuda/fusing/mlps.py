"""The gated product of an MLP in one kernel."""

from __future__ import annotations

from typing import Any

import torch

from draftwood_model_runner.runners.cuda.device.launching import launch
from draftwood_model_runner.runners.cuda.fusing.trying import agree
from draftwood_model_runner.runners.cuda.kernels.fused import silu_product

_BLOCK = 1024


def fuse_mlp(mlp: Any, dtype: torch.dtype) -> bool:
    """Replaces the forward of an MLP whose layers are gate_proj, up_proj and down_proj, if its activation is SiLU.

    Args:
        dtype: of its inputs; quantized weights have another.
    """
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = down(fused_silu(gate(x), up(x)))
        return output

    width = getattr(gate, "in_features", None)
    if width is None:
        return False
    sample = torch.randn(1, 3, width, dtype=dtype, device=next(mlp.parameters()).device)
    if not agree(forward, mlp.forward, sample):
        return False
    mlp.forward = forward
    return True


def fused_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of two tensors of one shape, which may be parts of wider rows."""
    width = gate.shape[-1]
    product = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up = gate.reshape(-1, width), up.reshape(-1, width)
    launch(
        silu_product,
        (gate.shape[0], -(-width // _BLOCK)),
        *(gate, up, product, gate.stride(0), up.stride(0), width),
        BLOCK=_BLOCK,
    )
    return product
