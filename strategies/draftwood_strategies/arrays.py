"""Types of the arrays and numbers that strategies work on, and segments of flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Integer: TypeAlias = int | np.integer[Any]
"""A whole number: an int in Python, any width of it in compiled code."""
Real: TypeAlias = float | np.floating[Any]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]


def segment_sizes(offsets: Int32Array) -> Int32Array:
    """int32[s], the sizes of segments by their `offsets`, int32[s + 1]; `np.diff` takes five times as long."""
    return offsets[1:] - offsets[:-1]


def segment_indices(offsets: Int32Array, chosen: Sequence[int]) -> tuple[Int64Array, Int32Array]:
    """Indices of the entries of some segments, int64[n], and the offsets of these among them, int32[len(chosen) + 1].

    Args:
        offsets: int32[s + 1], of all segments.
    """
    rows = np.array(chosen, np.int64)
    starts, of_chosen = offsets[rows], np.zeros(rows.shape[0] + 1, np.int32)
    sizes = offsets[rows + 1] - starts
    np.cumsum(sizes, out=of_chosen[1:])
    return np.arange(of_chosen[-1]) + np.repeat(starts - of_chosen[:-1], sizes), of_chosen
