"""Linear layers for CPUs: weights laid out once for oneDNN, instead of by every call.

A plain `nn.Linear` reorders its weight in each call with more than one row, which costs more than the arithmetic of a
draft tree. The packed kernel also computes a row the same way however many rows share the call; some shapes only
from two rows on, so a row that is alone in the call goes there twice.
"""

from __future__ import annotations

import logging
from typing import TypeGuard

import torch
from torch import nn

from model_runner.machine import bound_kernel_caches

_TRIAL_ROWS = 256
_log = logging.getLogger(__name__)
_TYPICAL_ROWS = 32
"""Rows that oneDNN chooses the layout for; others are computed with the same layout."""
_KEPT_WIDTHS = 64
"""Numbers of rows that kernels are kept for. One that is not there takes 0.3 ms to make."""


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight, [out, in], is kept in oneDNN's own layout only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)
        self.pairs_single_rows = False

    @property
    def weight(self) -> torch.Tensor:
        """The packed weight, opaque: for those who ask for its dtype or device."""
        packed: torch.Tensor = self._packed
        return packed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]. A row's bits do not depend on the others."""
        if self.pairs_single_rows and inputs.numel() == self.in_features:
            pair = self._product(inputs.reshape(1, -1).expand(2, -1))
            return pair[:1].view(*inputs.shape[:-1], self.out_features)
        return self._product(inputs)

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        product = torch.ops.mkldnn._linear_pointwise.default
        outputs: torch.Tensor = product(inputs, self._packed, self.bias, "none", [], "")
        return outputs

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(module: nn.Module) -> int:
    """Replaces a CPU model's linear layers, where this build of torch can; returns how many it replaced.

    Layers that other code derives from `nn.Linear` are left alone: they may compute something else.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        _log.warning("this build of torch has no oneDNN: linear layers stay as they are, and drafts cost more")
        return 0
    linears = [child for child in module.modules() if _is_linear(child)]
    for dtype in sorted({str(one.weight.dtype) for one in linears if not _packable(one.weight.dtype)}):
        _log.warning("this CPU multiplies row by row in %s: a draft costs it more there than in float32", dtype)
    packable = {one for one in linears if _packable(one.weight.dtype)}
    bound_kernel_caches(len({one.weight.shape for one in packable}))
    replaced = 0
    varies: dict[tuple[int, int, torch.dtype], bool] = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child in packable:
                packed = PackedLinear(child)
                shape = (packed.in_features, packed.out_features, child.weight.dtype)
                if shape not in varies:
                    varies[shape] = _single_rows_vary(packed)
                packed.pairs_single_rows = varies[shape]
                setattr(parent, name, packed)
                replaced += 1
    return replaced


def _single_rows_vary(packed: PackedLinear) -> bool:
    """Whether a row that is alone gets other bits. Rounding to bfloat16 hides most differences: try many rows."""
    rows = torch.randn(_TRIAL_ROWS, packed.in_features, dtype=packed.weight.dtype)
    together = packed(rows)
    return not all(torch.equal(packed(rows[i : i + 1])[0], together[i]) for i in range(_TRIAL_ROWS))


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.device.type == "cpu"


def _packable(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
