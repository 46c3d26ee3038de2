"""Linear layers for CPUs: fused where they share an input, and packed once for the library that multiplies best."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import nn

from model_runner.runners.torch.linear import fbgemm_linear, onednn_linear
from model_runner.runners.torch.linear.fbgemm_linear import FbgemmLinear
from model_runner.runners.torch.linear.fused_linear import FusedLinear, LinearPart, joined
from model_runner.runners.torch.linear.onednn_linear import OneDnnLinear

_log = logging.getLogger(__name__)

Packer = type[OneDnnLinear] | type[FbgemmLinear]


def pack_linears(module: nn.Module, groups: Sequence[Sequence[str]] = ()) -> int:
    """Replaces a CPU model's linear layers, where this machine can; returns how many it replaced.

    Subclasses of `nn.Linear` are left alone: they may compute something else.

    Args:
        groups: names of layers that get the same input, to become one product; see `fused_linear.of_one_input`.
    """
    found = {name: child for name, child in module.named_modules(remove_duplicate=False) if _is_linear(child)}
    dtypes = {name: child.weight.dtype for name, child in found.items()}
    packers = {dtype: _packer(dtype) for dtype in {*dtypes.values()}}
    for dtype in sorted(str(dtype) for dtype, packer in packers.items() if packer is None):
        _log.warning("neither oneDNN nor FBGEMM multiplies in %s on this machine: drafts cost more there", dtype)
    grouped = [list(group) for group in groups if all(name in found for name in group)]
    alone = found.keys() - {name for group in grouped for name in group}
    units = [*grouped, *([name] for name in found if name in alone)]
    del found  # each weight goes when its packed copy is there
    replaced = 0
    for unit in units:
        packer = packers[dtypes[unit[0]]]
        if packer is not None:
            _replace(module, unit, packer)
            replaced += len(unit)
    return replaced


def linear_shapes(module: nn.Module) -> int:
    """How many different weight shapes the linear layers of a CPU model have."""
    return len({child.weight.shape for child in module.modules() if _is_linear(child)})


def _replace(module: nn.Module, names: Sequence[str], packer: Packer) -> None:
    linears = [child for name in names if _is_linear(child := module.get_submodule(name))]
    if len(linears) == 1:
        module.set_submodule(names[0], packer(linears[0]))
        return
    fused = FusedLinear(packer(joined(linears)), [linear.out_features for linear in linears])
    for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
        module.set_submodule(name, LinearPart(fused, index, linear))


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.device.type == "cpu"


def _packer(dtype: torch.dtype) -> Packer | None:
    """What packs a weight of this type; None where nothing on this machine does."""
    if onednn_linear.multiplies_in(dtype):
        return OneDnnLinear
    return FbgemmLinear if fbgemm_linear.multiplies_in(dtype) else None
