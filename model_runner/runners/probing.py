"""What the trials of all runners share: a tree to compare logits over, and how much they may differ."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from strategies.draft import DraftTree, Int32Array

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest `difference` that is rounding, by the dtype of the model. Not tuned; any value near works: tiny random models
show 2e-6 in float32 and 4e-2 in bfloat16, and a wrong mask far more."""


def path_with_wrong_siblings(path: Int32Array, vocab: int) -> DraftTree:
    """A tree with the path at nodes 0, 2, 4, ... and a sibling with another token beside each."""
    tokens = np.stack([path, (path + 1) % vocab], 1).reshape(-1)
    parents = np.repeat(np.arange(-2, 2 * len(path) - 2, 2, dtype=np.int32), 2)
    parents[:2] = -1
    return DraftTree.of(tokens, parents)


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two arrays of logits, relative to the largest logit that was expected."""
    expected = expected.float()
    return float((logits.float() - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def hidden_window(config: Any, windows: SequenceOf[int | None]) -> str | None:
    """Why a model's sliding window cannot be seen to, if one of its layers hides it from its attention function.

    Args:
        windows: what each layer passes.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(windows)
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if kind == "sliding_attention" and window != config.sliding_window:
            return (
                f"hides the sliding window of layer {layer} from its attention function: {window} was passed, the"
                f" config says {config.sliding_window}"
            )
    return None
