"""Logits of the rows of a step that need them, also of models whose forward computes those of every token."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch


def logits_of_rows(module: Any, rows: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Logits [R, vocab] of one forward pass.

    A model without the parameter `logits_to_keep`, such as Whisper's decoder, computes the logits of all tokens, of
    which R are taken.

    Args:
        module: a transformers model.
        rows: int64[R], the tokens that need logits.
        inputs: other keyword arguments of its forward; a batch of one.

    Raises:
        RuntimeError: the model gave another number of rows.
    """
    if _selects(module.__class__):
        logits: torch.Tensor = module(**inputs, logits_to_keep=rows).logits[0]
    else:
        logits = module(**inputs).logits[0].index_select(0, rows)
    check_rows(logits.shape, int(rows.shape[0]))
    return logits


def check_rows(shape: tuple[int, ...], wanted: int) -> None:
    """Raises RuntimeError if logits of this shape are not those of `wanted` tokens."""
    if shape[0] != wanted:
        raise RuntimeError(f"the model gave {shape[0]} rows of logits, {wanted} were asked for")


@cache
def _selects(model_class: Any) -> bool:
    """Whether forward has the parameter: many take any keyword and ignore those that they do not know."""
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters
