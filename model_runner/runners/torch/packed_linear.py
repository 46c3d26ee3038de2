"""Linear layers on CPUs whose weights are laid out once for oneDNN, instead of by every call.

A plain `nn.Linear` reorders its weight in each call with more than one row, which costs more than the arithmetic of a
draft tree. The packed kernel also computes a row the same way however many rows share the call; some shapes only
from two rows on, so a row that is alone in the call goes there twice.
"""

from __future__ import annotations

import logging
from typing import TypeGuard

import torch
from torch import nn

_log = logging.getLogger(__name__)

_TRIAL_ROWS = 256
_TYPICAL_ROWS = 32
"""Rows that oneDNN chooses the layout for; others are computed with the same layout."""

_varies: dict[tuple[int, int, torch.dtype], bool] = {}
"""Whether a row that is alone gets other bits, by in_features, out_features and dtype."""


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight, [out, in], is kept in oneDNN's own layout only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)
        kind = self.in_features, self.out_features, linear.weight.dtype
        if kind not in _varies:
            _varies[kind] = self._single_rows_vary()
        self._pairs_single_rows = _varies[kind]

    @property
    def weight(self) -> torch.Tensor:
        """The packed weight, opaque: for those who ask for its dtype or device."""
        packed: torch.Tensor = self._packed
        return packed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]. A row's bits do not depend on the others."""
        if self._pairs_single_rows and inputs.numel() == self.in_features:
            pair = self._product(inputs.reshape(1, -1).expand(2, -1))
            return pair[:1].view(*inputs.shape[:-1], self.out_features)
        return self._product(inputs)

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        product = torch.ops.mkldnn._linear_pointwise.default
        outputs: torch.Tensor = product(inputs, self._packed, self.bias, "none", [], "")
        return outputs

    def _single_rows_vary(self) -> bool:
        """Rounding to bfloat16 hides most differences: tries many rows."""
        rows = torch.randn(_TRIAL_ROWS, self.in_features, dtype=self.weight.dtype)
        together = self._product(rows)
        return not all(torch.equal(self._product(rows[i : i + 1])[0], together[i]) for i in range(_TRIAL_ROWS))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(module: nn.Module) -> int:
    """Replaces a CPU model's linear layers, where oneDNN multiplies in their dtype; returns how many it replaced.

    Subclasses of `nn.Linear` are left alone: they may compute something else.
    """
    found = {name: child for name, child in module.named_modules(remove_duplicate=False) if _is_linear(child)}
    dtypes = {linear.weight.dtype for linear in found.values()}
    for dtype in sorted(str(dtype) for dtype in dtypes if not _multiplies_in(dtype)):
        _log.warning("oneDNN does not multiply in %s on this machine: drafts cost more there", dtype)
    packable = [name for name, linear in found.items() if _multiplies_in(linear.weight.dtype)]
    for name in packable:
        module.set_submodule(name, PackedLinear(found.pop(name)))  # the weight goes when its packed copy is there
    return len(packable)


def linear_shapes(module: nn.Module) -> int:
    """How many different weight shapes the linear layers of a CPU model have."""
    return len({child.weight.shape for child in module.modules() if _is_linear(child)})


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.device.type == "cpu"


def _multiplies_in(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and this CPU has what it needs for the type."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
