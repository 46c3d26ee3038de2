"""Linear layers of one input as one product: queries, keys and values of attention, gate and up of an MLP.

The modules stay. When the first of them is called in a step, it computes all, and the others hand out their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from draftwood_model_runner.runners.cuda.steps.attention import STEP

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join_products(part: nn.Module) -> int:
    """Joins linear layers of a module that have the same input; returns how many products became fewer.

    Their weights become views of one tensor, and are copied for it one group after the other.
    """
    children = dict(part.named_children())
    fewer = 0
    for names in _GROUPS:
        layers = [layer for name in names if type(layer := children.get(name)) is nn.Linear]
        if len(layers) == len(names) and _can_be_one(layers):
            _join(layers)
            fewer += len(layers) - 1
    return fewer


def _can_be_one(layers: Sequence[nn.Linear]) -> bool:
    """Whether all are plain, in one place and alike in all but width."""
    plain = all(
        {type(parameter) for parameter in layer.parameters()} == {nn.Parameter}
        and layer.weight.dtype.is_floating_point
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        for layer in layers
    )
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return plain and len(kinds) == 1


def _join(layers: Sequence[nn.Linear]) -> None:
    weight = _joined([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])
    for layer in layers:
        layer.forward = _part(layer, layers, weight, bias)  # type: ignore[method-assign,assignment]


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all; each parameter becomes a view of its own."""
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.cat([parameter.data for parameter in parameters])
        parts = rows.split([parameter.shape[0] for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
    if rows.device.type == "cuda":
        torch.cuda.empty_cache()  # the next weights are larger than each of those that were freed
    return rows


def _part(
    layer: nn.Linear, layers: Sequence[nn.Linear], weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a layer, of those whose joined weight [columns, inner] and bias [columns] are given."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of [..., in_features]; in a step, a part of wider rows."""
        step = STEP.get(None)
        if step is None:
            return functional.linear(inputs, layer.weight, layer.bias)
        if (found := step.pending.take(layer, inputs)) is not None:
            return found
        parts = functional.linear(inputs, weight, bias).split([one.out_features for one in layers], -1)
        results: dict[object, torch.Tensor] = dict(zip(layers, parts, strict=True))
        own = results.pop(layer)
        step.pending.put(inputs, results)
        return own

    return forward
