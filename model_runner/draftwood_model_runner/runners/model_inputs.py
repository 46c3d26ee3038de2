"""What the forward of a model, or of a layer, is given beside tokens: transformers' cache, and positions.

If it takes no positions, its position embeddings are given those of the tree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import nn

from draftwood_model_runner.runners.attention_hook import setting

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Since transformers 5.24; before that, and that of models without attention."""
_LENGTHS = frozenset({"cache_length", "past_key_values_length"})
"""How position embeddings name the length of the cache, since transformers 5.24 and before."""
_POSITIONS: ContextVar[torch.Tensor | None] = ContextVar("draftwood_positions", default=None)
"""int64[batch, T] of the step that the model of this thread computes; None outside steps."""


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name by which a forward takes transformers' cache, and its output has it; None if it takes none."""
    names = inspect.signature(forward).parameters
    return next((name for name in _CACHE_NAMES if name in names), None)


@cache
def cache_argument_of(model_class: Any) -> str:
    """That of a model; the usual one if its forward takes whatever it is given."""
    from transformers.masking_utils import create_causal_mask  # imports what most loading does without

    return cache_argument(model_class.forward) or cache_argument(create_causal_mask) or _CACHE_NAMES[0]


@cache
def takes_positions(model_class: Any) -> bool:
    """Whether the forward of a model takes `position_ids`."""
    return "position_ids" in inspect.signature(model_class.forward).parameters


def plain_positions(module: Any, tokens: int, past: int = 0) -> dict[str, torch.Tensor]:
    """The argument `position_ids` as `generate` gives it for `tokens` tokens after `past` others; none where it gives
    none."""
    if not takes_positions(module.__class__):
        return {}
    return {"position_ids": torch.arange(past, past + tokens, device=module.device)[None]}


def positions_of_step(positions: torch.Tensor) -> AbstractContextManager[None]:
    """While it lasts, position embeddings that `follow_positions` found are given these positions, int64[batch, T]."""
    return setting(_POSITIONS, positions)


def follow_positions(module: Any) -> int:
    """Lets the position embeddings of a model whose forward takes no positions, such as BART's decoder, follow those of
    the step, see `positions_of_step`. Outside steps they compute what they did. Returns how many were found."""
    if takes_positions(module.__class__):
        return 0
    found = [part for part in module.modules() if _is_position_embedding(part)]
    for part in found:
        if _given not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_given, with_kwargs=True)
            part.register_forward_hook(_in_shape)
    return len(found)


def _is_position_embedding(part: nn.Module) -> bool:
    names = inspect.signature(type(part).forward).parameters
    return not list(part.children()) and "position_ids" in names and not _LENGTHS.isdisjoint(names)


def _given(
    part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    positions = _POSITIONS.get()
    return None if positions is None else (args, {**kwargs, "position_ids": positions.flatten()})


def _in_shape(part: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
    """The embeddings of a batch of several rows, which were looked up as one."""
    positions = _POSITIONS.get()
    if positions is None or positions.shape[0] == 1:
        return None
    return output.reshape(*positions.shape, output.shape[-1])
