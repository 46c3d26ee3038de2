"""Compilation of the functions that run for every token, and the types that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Integer: TypeAlias = int | np.integer[Any]
"""A whole number: an int in Python, any width of it in compiled code."""
Real: TypeAlias = float | np.floating[Any]
Int64Array: TypeAlias = npt.NDArray[np.int64]

_njit: Any = numba.njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Decorator: `function` as machine code, cached on disk, run without the interpreter's lock.

    It borrows its arrays: without numba's reference counts (two atomic operations for each array of each inner call)
    a draft takes a third of the time. So it must not create arrays; callers lend it room. Called from Python it takes
    arrays and numbers, for a tuple of arrays takes longer to unpack than to use; inside, tuples cost nothing.
    """
    return cast(Function, _njit(cache=True, nogil=True, _nrt=False)(function))
