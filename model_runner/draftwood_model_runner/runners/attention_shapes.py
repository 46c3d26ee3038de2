"""What the layers of a model call attention with, found out by calling it once."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.attention_hook import AttentionHook
from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.probing import does_not_run, hidden_window, too_few_calls

_TOKENS = 5


class AttentionCall(NamedTuple):
    """What a layer calls attention with.

    Attributes:
        layer: its number; None if it has none.
        dtype: of keys and values.
        group: heads that share a key.
        options: those of `scaling`, `sliding_window`, `softcap` and `s_aux` that it passes.
    """

    layer: int | None
    shape: KVShape
    dtype: torch.dtype
    group: int
    options: dict[str, Any]


_OPTIONS = ("scaling", "sliding_window", "softcap", "s_aux")


def _noted_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Zeros [1, T, head, value_dim] in place of attention, see `tree_attention`: only the shapes matter."""
    layer: Any = getattr(module, "layer_idx", None)
    shape = KVShape(key.shape[1], key.shape[3], value.shape[3])
    options = {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}
    _CALLS.get().append(AttentionCall(layer, shape, key.dtype, query.shape[1] // key.shape[1], options))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def attention_window(calls: SequenceOf[AttentionCall], max_context: int) -> int | None:
    """The last tokens that any token attends to at most, its own included, whichever the layer; None for all.

    Args:
        max_context: positions that the model will be run on at most.
    """
    widest = max((call.options.get("sliding_window", max_context) for call in calls), default=max_context)
    return int(widest) if widest < max_context else None


_CALLS = AttentionHook[list[AttentionCall]]("draftwood_noted", _noted_attention)
"""Its step is where calls are noted."""


def attention_calls(module: Any, max_context: int, every_layer: bool = True) -> list[AttentionCall]:
    """What layers call attention with, in their order.

    Read off the calls of attention: what a model keeps in a cache of its own may be something smaller.

    Args:
        every_layer: each layer has to call it; otherwise some or none, in any order.

    Raises:
        UnsupportedModelError: they do not call it as a model does on which draft trees can be verified.
    """
    name, config = type(module).__name__, module.config.get_text_config()
    calls = _calls_of(module)
    if every_layer and (reason := too_few_calls(len(calls), config)):
        raise UnsupportedModelError(f"{name} {reason}")
    if every_layer and [call.layer for call in calls] != list(range(len(calls))):
        raise UnsupportedModelError(f"{name} does not number its layers from 0 on: {[call.layer for call in calls]}")
    windows = [call.options.get("sliding_window") for call in calls]
    if every_layer and (reason := hidden_window(config, windows, max_context)):
        raise UnsupportedModelError(f"{name} {reason}")
    return calls


@torch.no_grad()
def _calls_of(module: Any) -> list[AttentionCall]:
    """The calls of attention in a forward pass.

    Raises:
        UnsupportedModelError: the model does not run.
    """
    calls: list[AttentionCall] = []
    try:
        _CALLS.install(module)
        with _CALLS.during(calls):
            module(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long, device=module.device), use_cache=False)
    except Exception as error:
        raise UnsupportedModelError(does_not_run(type(module).__name__, error)) from error
    return calls
