"""Linear layers on CPUs whose weights are laid out once for oneDNN, instead of by every call; and for which widths.

A plain `nn.Linear` reorders its weight in each call with more than one row, which costs more than the arithmetic of a
draft tree. The packed kernel also computes a row the same way however many rows share the call, within bounds that a
trial finds. For some shapes that holds only from two rows on, so a single row is computed as two equal rows. With AMX
it holds only up to 32 rows, so more rows are split over several calls.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeGuard

import torch
from torch import nn

_log = logging.getLogger(__name__)

_TYPICAL_ROWS = 32
"""Rows that oneDNN chooses the layout for; others are computed with the same layout."""
_FEW, _MOST = 16, 256
"""Rows of the products that others are compared with, and rows of one product at most."""
_TRIED = (*range(1, 34), 40, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, _MOST)
_TRIAL_OUTPUTS = 1024
"""Different rows of the trial's weight; it repeats them."""

_bounds: dict[tuple[int, int, torch.dtype, int], RowBounds] = {}
"""Bounds by in_features, out_features, dtype and number of threads: oneDNN divides some products among threads so that
a single row is summed in another order."""
KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Environment variables that torch and oneDNN read at their first product: how many kernels each keeps."""
_WIDTHS = (*range(1, 33), *range(34, 65, 2), *range(72, 129, 8), *range(144, 257, 16), *range(288, 513, 32))
_BEYOND = 64


class RowBounds(NamedTuple):
    """A row gets the same bits in all products of up to `most` rows. If `pairs_single`, that holds from two rows on,
    and a single row is computed as two equal ones."""

    pairs_single: bool
    max_rows: int


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight, [out, in], is kept in oneDNN's own layout only. Made with as many threads as it
    computes with."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)
        kind = self.in_features, self.out_features, linear.weight.dtype
        key = *kind, torch.get_num_threads()
        if key not in _bounds:
            _bounds[key] = _tried_bounds(*kind)
        self._rows = _bounds[key]

    @property
    def weight(self) -> torch.Tensor:
        """The packed weight, opaque: for those who ask for its dtype or device."""
        packed: torch.Tensor = self._packed
        return packed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]. A row's bits do not depend on the others."""
        rows = inputs.reshape(-1, self.in_features)
        if rows.shape[0] <= self._rows.max_rows:
            outputs = self._product(rows)
        else:
            outputs = torch.cat([self._product(part) for part in rows.split(self._rows.max_rows)])
        return outputs.view(*inputs.shape[:-1], self.out_features)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] == 1 and self._rows.pairs_single:
            return _product(rows.expand(2, -1), self._packed, self.bias)[:1]
        return _product(rows, self._packed, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _product(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")
    return outputs


def _tried_bounds(ins: int, outs: int, dtype: torch.dtype) -> RowBounds:
    """What this machine's kernels keep to for weights [outs, ins] on the present number of threads, tried with many
    numbers of rows.

    In exact arithmetic all results are 0: each term is there with both signs, in random places. What is computed is
    what rounding leaves of them, and another order of summation changes nearly all of it. With ordinary numbers
    rounding to bfloat16 hides all but one difference in thousands.
    """
    random = torch.Generator().manual_seed(0)
    places = torch.randperm(ins, generator=random)[: ins // 2 * 2]

    def paired(rows: int, sign: int) -> torch.Tensor:
        half = torch.randn(rows, ins // 2, generator=random).to(dtype)
        numbers = torch.zeros(rows, ins, dtype=dtype)
        numbers[:, places] = torch.cat([half, sign * half], 1)
        return numbers

    weight = paired(_TRIAL_OUTPUTS, -1).repeat(-(-outs // _TRIAL_OUTPUTS), 1)[:outs]
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    rows = paired(_MOST, 1)
    expected = torch.cat([_product(part, packed) for part in rows.split(_FEW)])
    differing = [n for n in _TRIED if not torch.equal(_product(rows[-n:], packed), expected[-n:])]
    max_rows = min((n for n in differing if n > 1), default=_MOST + 1) - 1
    if max_rows < _FEW:
        return RowBounds(False, 1)
    return RowBounds(1 in differing, 1 << max_rows.bit_length() - 1)


@contextmanager
def noted_calls(module: nn.Module) -> Iterator[set[nn.Module]]:
    """The modules of a model that are called while this lasts."""
    called: set[nn.Module] = set()
    hook = nn.modules.module.register_module_forward_pre_hook(lambda part, _: called.add(part))
    try:
        yield called
    finally:
        hook.remove()


def pack_linears(module: nn.Module, called: set[nn.Module] | None = None) -> int:
    """Replaces a CPU model's linear layers, where oneDNN multiplies in their dtype; returns how many it replaced.

    Subclasses of `nn.Linear`, and layers with hooks or a forward of their own, are left alone: they may compute
    something else. So is a layer of a module that was called without calling it: that reads the weight itself.

    Args:
        called: what a forward pass of the model called, see `noted_calls`; None if that is not known.
    """
    linears = {name: child for name, child in module.named_modules(remove_duplicate=False) if _is_linear(child)}
    dtypes = {linear.weight.dtype for linear in linears.values()}
    for dtype in sorted(str(dtype) for dtype in dtypes if not _multiplies_in(dtype)):
        _log.warning("oneDNN does not multiply in %s on this machine: drafts cost more there", dtype)
    packable = [
        name
        for name, linear in linears.items()
        if _multiplies_in(linear.weight.dtype) and not _is_read(module, name, called or set())
    ]
    for name in packable:
        module.set_submodule(name, PackedLinear(linears.pop(name)))  # the weight goes when its packed copy is there
    return len(packable)


def _is_read(module: nn.Module, name: str, called: set[nn.Module]) -> bool:
    """Whether the module that holds a layer was called and did not call it."""
    return module.get_submodule(name.rpartition(".")[0]) in called and module.get_submodule(name) not in called


def linear_shapes(module: nn.Module) -> int:
    """How many different weight shapes the linear layers of a CPU model have."""
    return len({child.weight.shape for child in module.modules() if _is_linear(child)})


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    plain = type(module) is nn.Linear and {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    replaced = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return plain and not replaced and module.weight.device.type == "cpu"


def _multiplies_in(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and this CPU has what it needs for the type."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def kernel_width(rows: int) -> int:
    """The number of rows that a product of `rows` rows is best filled up to.

    oneDNN compiles a kernel for each, in 0.3 ms, and keeps it: 0.55 MiB. Up to 32 rows each has its own, above it is up
    to an eighth more.
    """
    if rows > _WIDTHS[-1]:
        return -(-rows // _BEYOND) * _BEYOND
    return int(_WIDTHS[bisect_left(_WIDTHS, rows)])


def bound_kernel_caches(shapes: int) -> None:
    """Lets torch and oneDNN keep kernels for weights of `shapes` shapes and all usual widths, unless the environment
    already sets a number: the default of 1,024 takes half a gigabyte. Has no effect after the first product of the
    process, when both libraries have read their limits.
    """
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(shapes * (len(_WIDTHS) + 8)))
