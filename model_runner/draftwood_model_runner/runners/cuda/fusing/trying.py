"""Whether a replacement computes what a module of transformers does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

_log = logging.getLogger(__name__)
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference that is rounding, of numbers of about 1."""


def agree(
    ours: Callable[..., Any], theirs: Callable[..., Any], *samples: torch.Tensor, to_the_bit: bool = False
) -> bool:
    """Whether two functions return the same for samples, a tensor or several, but for rounding; False if one raises."""
    try:
        outputs, expected = (_tensors(function(*samples)) for function in (ours, theirs))
        same = torch.equal if to_the_bit else _near
        return all(same(one, right) for one, right in zip(outputs, expected, strict=True))
    except Exception as error:
        _log.info("an operation is not replaced: %s: %s", type(error).__name__, error)
        return False


def _tensors(output: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (output,) if isinstance(output, torch.Tensor) else output


def _near(output: torch.Tensor, expected: torch.Tensor) -> bool:
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return False
    scale = max(1.0, float(expected.float().abs().max()))
    return float((output.float() - expected.float()).abs().max()) <= _TOLERANCE[output.dtype] * scale
