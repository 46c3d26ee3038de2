"""Linear layers of one input as one product: queries, keys and values of attention, gate and up of an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional


class ParallelLinears:
    """Linear layers of one input, which are one product where they can be.

    Args:
        layers: their weights become views of one tensor if they are joined, so that no more memory is taken.
        join: whether they may be; they are if all are plain, on one device and alike in all but width.
    """

    def __init__(self, layers: Sequence[nn.Module], join: bool) -> None:
        self._layers = layers
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        plain = [layer for layer in layers if type(layer) is nn.Linear]
        if join and len(plain) == len(layers) and _alike(plain):
            self._widths = [layer.out_features for layer in plain]
            self._weight = _joined([layer.weight for layer in plain])
            self._bias = None if plain[0].bias is None else _joined([layer.bias for layer in plain])

    @property
    def joined(self) -> bool:
        """Whether they are one product."""
        return self._weight is not None

    def __call__(self, inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Of each layer [..., out_features] of inputs [..., in_features]; of a joined product, parts of wider rows."""
        if self._weight is None:
            return [layer(inputs) for layer in self._layers]
        parts: Sequence[torch.Tensor] = functional.linear(inputs, self._weight, self._bias).split(self._widths, -1)
        return parts


def _alike(layers: Sequence[nn.Linear]) -> bool:
    plain = all(
        {type(parameter) for parameter in layer.parameters()} == {nn.Parameter}
        and layer.weight.dtype.is_floating_point
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        for layer in layers
    )
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return plain and len(kinds) == 1


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all; each parameter becomes a view of its own."""
    # A parameter stays what it is: one of inference mode cannot be used alone with memory of another mode.
    with torch.inference_mode(parameters[0].is_inference()), torch.no_grad():
        rows = torch.cat([parameter.data for parameter in parameters])
        parts = rows.split([parameter.shape[0] for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
    if rows.device.type == "cuda":
        torch.cuda.empty_cache()  # the next weights are larger than each of those that were freed
    return rows
