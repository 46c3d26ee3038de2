"""What the trials of all runners share: a tree to compare logits over, how much they may differ, and why not."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.shrinking import shrunken, thresholds
from draftwood_strategies.draft import DraftTree, Int32Array

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest `difference` that is rounding, by the dtype of the model: tiny random models
show 2e-6 in float32 and 4e-2 in bfloat16, and a wrong mask far more."""

_FOUR_BITS = 3e-3
"""As `TOLERANCE` for bitsandbytes' layers of 4 bits, whose kernel for single tokens differs by 1.7e-3."""
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})


def tolerance_of(module: Any) -> float:
    """The largest `difference` that is rounding in a model."""
    four_bits = getattr(getattr(module.config, "quantization_config", None), "load_in_4bit", False)
    return max(TOLERANCE[module.dtype], _FOUR_BITS if four_bits else 0.0)


def path_with_wrong_siblings(path: Int32Array, vocab: int) -> DraftTree:
    """A tree with the path at nodes 0, 2, 4, ... and a sibling with another token beside each."""
    tokens = np.stack([path, (path + 1) % vocab], 1).reshape(-1)
    parents = np.repeat(np.arange(-2, 2 * len(path) - 2, 2, dtype=np.int32), 2)
    parents[:2] = -1
    return DraftTree.of(tokens, parents)


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two arrays of logits, relative to the largest logit that was expected; infinite if one
    is no number."""
    expected = expected.float()
    largest = (logits.float() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    return float(largest.nan_to_num(nan=math.inf))


def hidden_window(config: Any, windows: SequenceOf[int | None], max_context: int) -> str | None:
    """Why a model's sliding window cannot be seen to, if one of its layers hides it from its attention function.

    Args:
        windows: what each layer passes.
        max_context: positions that the model will be run on at most.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(windows)
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if kind == "sliding_attention" and window != config.sliding_window and config.sliding_window < max_context:
            return (
                f"hides the sliding window of layer {layer} from its attention function: {window} was passed, the"
                f" config says {config.sliding_window}{shorter_context(config.sliding_window)}"
            )
    return None


def shorter_context(tokens: int) -> str:
    """What a user can do about a mechanism that only matters beyond some tokens."""
    return f"; up to {tokens} tokens it makes no difference: set max_context to {tokens} or less"


def unsupported_layers(config: Any, max_context: int) -> str | None:
    """Why draft trees cannot be verified, if a model has layers that do not attend to all or the last few tokens."""
    # RecurrentGemma's name before transformers 5.23 is the second.
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    chunk: int = getattr(config, "attention_chunk_size", None) or 0
    if chunk >= max_context:
        kinds.discard("chunked_attention")
    odd = kinds - _PLAIN_LAYERS
    if not odd:
        return None
    advice = shorter_context(chunk) if chunk and odd == {"chunked_attention"} else ""
    return (
        f"layers of type {', '.join(sorted(odd))} are not supported: a draft tree can only be verified where every"
        f" layer attends to all earlier tokens or to the last few{advice}"
    )


def does_not_run(name: str, error: Exception) -> str:
    """What a trial that raised says of a model."""
    return f"{name} does not run with tree attention: {type(error).__name__}: {error}"


def too_few_calls(calls: int, config: Any) -> str | None:
    """Why draft trees cannot be verified, if not every layer calls attention by transformers' interface."""
    layers = int(getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None) or 0)
    if calls == layers:
        return None
    if calls == 0:
        return (
            "computes attention in code of its own, as models with ALiBi or relative positions do, or has none; the"
            " mask of a draft tree can only be put where a model calls transformers' attention interface"
        )
    return (
        f"calls transformers' attention interface {calls} times for {layers} layers: those that share keys and values,"
        " keep a state or attend in code of their own are not supported"
    )


def try_beyond_thresholds(module: Any, max_context: int, trial: Callable[[Any], object]) -> None:
    """Tries the architecture of a model beyond its windows, chunks and other thresholds, on a small copy.

    Args:
        max_context: positions that the model will be run on at most. Thresholds beyond it do not matter.
        trial: runs a copy; raises UnsupportedModelError if it computes something else than transformers.

    Raises:
        UnsupportedModelError: the trial failed, or there can be no copy.
    """
    limits = thresholds(module.config.get_text_config(decoder=True), max_context)
    if not limits:
        return
    name, named = type(module).__name__, ", ".join(f"{key} = {value}" for key, value in limits.items())
    advice = shorter_context(min(limits.values()))
    try:
        copied = shrunken(module)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: what it computes beyond {named} cannot be tried, as there is no small copy of it"
            f" ({type(error).__name__}: {error}){advice}"
        ) from error
    try:
        trial(copied.to(module.device))
    except UnsupportedModelError as error:
        raise type(error)(
            f"{name}: beyond {named} its layers compute something that drafts cannot be verified with, such as a window"
            f" that is in its own mask only{advice} (in a small copy: {error})"
        ) from error
