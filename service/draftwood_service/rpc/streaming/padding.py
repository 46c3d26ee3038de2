"""Fills messages up with random bytes."""

from __future__ import annotations

import math
import os

from draftwood.v1 import generation_pb2 as pb

_SMALLEST = 2
"""Bytes of an empty entry of `padding`: tag and length."""


def pad(message: pb.GenerateResponse, multiple: int) -> None:
    """Adds random bytes, which no compression on the way removes, so that the serialized size is a multiple."""
    gap = -message.ByteSize() % multiple
    if gap == 0:
        return
    if gap < _SMALLEST:
        gap += multiple
    size = _entry(gap)
    if size is None:  # the length takes a byte too many or too few: an empty entry takes the difference
        message.padding.append(b"")
        size = _entry(gap - _SMALLEST)
        assert size is not None
    message.padding.append(os.urandom(size))


def _entry(gap: int) -> int | None:
    """Bytes in an entry of `padding` that takes `gap` bytes with its tag and length; None if there is no such entry."""
    for length_bytes in (1, 2, 3):
        size = gap - 1 - length_bytes
        if size >= 0 and max(1, math.ceil(size.bit_length() / 7)) == length_bytes:
            return size
    return None
