"""A gated MLP: gate and up are one product, and what follows them one kernel."""

from __future__ import annotations

from typing import Any

import torch

from draftwood_model_runner.runners.cuda.constants import SILU_BLOCK
from draftwood_model_runner.runners.cuda.device.launching import launch
from draftwood_model_runner.runners.cuda.fusing.linears import ParallelLinears
from draftwood_model_runner.runners.cuda.kernels.fused import silu_product


class FusedMLP:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)).

    Args:
        mlp: with these four modules.
        silu: the activation is SiLU, whose product is one kernel.
        join: gate and up may be one product.
    """

    def __init__(self, mlp: Any, silu: bool, join: bool) -> None:
        self._mlp, self._silu = mlp, silu
        self.products = ParallelLinears([mlp.gate_proj, mlp.up_proj], join)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] of [..., size]."""
        gate, up = self.products(x)
        product = fused_silu(gate, up) if self._silu else self._mlp.act_fn(gate) * up
        output: torch.Tensor = self._mlp.down_proj(product)
        return output


def fused_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of two tensors of one shape, which may be parts of wider rows."""
    width = gate.shape[-1]
    product = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up = gate.reshape(-1, width), up.reshape(-1, width)
    launch(
        silu_product,
        (gate.shape[0], -(-width // SILU_BLOCK)),
        *(gate, up, product, gate.stride(0), up.stride(0), width),
        BLOCK=SILU_BLOCK,
    )
    return product
