"""Decoder layers whose residuals are added within the norm that follows.

The layer hands on the sum, as before. The norm of the sum, which the next layer begins with, waits for that norm.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from draftwood_model_runner.runners.cuda.fusing.norms import FusedNorm
from draftwood_model_runner.runners.cuda.fusing.trying import agree
from draftwood_model_runner.runners.cuda.steps.attention import STEP
from draftwood_model_runner.runners.cuda.steps.pending import Pending

_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


def fuse_residuals(model: nn.Module) -> int:
    """Replaces the forwards of a model's `layers` that are those of Llama, and whose norms are fused; returns how many.

    Args:
        model: with a norm after the last layer, `norm`.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return 0
    found = list(layers)
    following = [*(getattr(layer, "input_layernorm", None) for layer in found[1:]), getattr(model, "norm", None)]
    return sum(_fuse_layer(layer, norm) for layer, norm in zip(found, following, strict=True))


def _fuse_layer(layer: Any, following: Any) -> bool:
    children = {name for name, child in layer.named_children() if not isinstance(child, nn.Dropout)}
    if children != _PARTS or "forward" in vars(layer):
        return False
    middle, after = (_fused(norm) for norm in (layer.post_attention_layernorm, following))
    if middle is None or after is None:
        return False
    original: Callable[..., torch.Tensor] = layer.forward
    options = _options(original)

    def forward(hidden_states: torch.Tensor, *arguments: Any, **given: Any) -> torch.Tensor:
        step = STEP.get(None)
        if step is None or arguments:
            return original(hidden_states, *arguments, **given)
        return _layer(layer, middle, after, step.pending, hidden_states, {**options, **given})

    if not _is_right(layer, options):
        return False
    layer.forward = forward
    return True


def _fused(norm: Any) -> FusedNorm | None:
    forward = vars(norm).get("forward") if isinstance(norm, nn.Module) else None
    usable = isinstance(forward, FusedNorm) and not (norm._forward_hooks or norm._forward_pre_hooks)
    return forward if usable else None


def _options(forward: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of a layer's forward, beside its hidden states; None for what has none."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [one for one in inspect.signature(forward).parameters.values() if one.kind in kinds]
    return {one.name: None if one.default is one.empty else one.default for one in parameters[1:]}


def _layer(
    layer: Any,
    middle: FusedNorm | _Stand,
    after: FusedNorm | _Stand,
    pending: Pending,
    hidden_states: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """The layer, [1, T, size] of [1, T, size]; leaves the norm of its result in `pending`."""
    attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)[0]
    residual, normed = middle.of_sum(hidden_states, attended)
    total, result = after.of_sum(residual, layer.mlp(normed))
    pending.put(total, {after: result})
    return total


def _is_right(layer: Any, options: dict[str, Any]) -> bool:
    """Whether the layer does with its parts what ours does, to the bit, and hands its options on."""
    weight = layer.post_attention_layernorm.weight
    sample = torch.randn(1, 3, weight.numel(), dtype=weight.dtype, device=weight.device)
    attention, (before, middle, mlp, after) = _Attention(sample), (_Stand(sample) for _ in range(4))
    tried = copy.copy(layer)
    parts = {"input_layernorm": before, "self_attn": attention, "post_attention_layernorm": middle, "mlp": mlp}
    tried._modules = {**layer._modules, **parts}
    marked = {name: object() for name in options}

    def plain(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = tried(hidden_states, **marked)
        return output, after(output)

    def ours(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        pending = Pending()
        output = _layer(tried, middle, after, pending, hidden_states, marked)
        return output, pending.take(after, output)

    return agree(ours, plain, sample, to_the_bit=True) and attention.options[0] == attention.options[1]


class _Stand(nn.Module):
    """Stands for a part of a layer: the magnitudes of a row in another order, so that no two parts can be exchanged."""

    def __init__(self, sample: torch.Tensor) -> None:
        super().__init__()
        self._order = torch.randperm(sample.shape[-1], device=sample.device)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[..., self._order].abs()

    def of_sum(self, residual: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + hidden_states
        return total, self.forward(total)


class _Attention(_Stand):
    """Stands for attention, and notes the options of each call."""

    def __init__(self, sample: torch.Tensor) -> None:
        super().__init__(sample)
        self.options: list[dict[str, Any]] = []

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        self.options.append(options)
        return super().forward(hidden_states), None
