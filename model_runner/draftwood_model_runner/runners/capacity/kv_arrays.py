"""What the KV caches of all runners have in common: their arrays, one for all layers of a shape. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeVar

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.runners.base import KVShape

Arrays = TypeVar("Arrays")


def bytes_per_token(shapes: SequenceOf[KVShape], itemsize: int, more_values: int = 0) -> int:
    """Bytes of the keys and values of one token in all layers.

    Args:
        itemsize: bytes of a number.
        more_values: numbers that each head stores beside its value.
    """
    return itemsize * sum(heads * (key_dim + value_dim + more_values) for heads, key_dim, value_dim in shapes)


def allocated(
    shapes: SequenceOf[KVShape], tokens: int, token_bytes: int, empty: Callable[[KVShape, int], Arrays]
) -> dict[KVShape, Arrays]:
    """The arrays of each shape.

    Args:
        tokens, token_bytes: capacity, and the bytes of a token, for the text of the error.
        empty: makes the arrays of so many layers of a shape.

    Raises:
        InvalidValueError: the device has no memory for them.
    """
    try:
        return {shape: empty(shape, layers) for shape, layers in Counter(shapes).items()}
    except (MemoryError, OSError, RuntimeError) as error:  # RuntimeError: torch, on either device
        gigabytes = tokens * token_bytes / 1e9
        raise InvalidValueError(
            "kv_cache_tokens", tokens, f"the device has no memory for their {gigabytes:.1f} GB of keys and values"
        ) from error


def by_layer(shapes: SequenceOf[KVShape], arrays: Mapping[KVShape, Any]) -> list[Any]:
    """For each layer its part, without a copy, of arrays that each hold all layers of a shape, one after the other."""
    used = Counter[KVShape]()
    parts = []
    for shape in shapes:
        parts.append(arrays[shape][used[shape]])
        used[shape] += 1
    return parts
