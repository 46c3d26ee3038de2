"""The argument by which a model, or a layer of one, takes transformers' cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_NAMES = ("cache", "past_key_values", "cache_params")
"""Since transformers 5.24; before that, and that of models without attention."""


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Its name, by which a model's output has the cache as well; None if `forward` takes none."""
    names = inspect.signature(forward).parameters
    return next((name for name in _NAMES if name in names), None)
