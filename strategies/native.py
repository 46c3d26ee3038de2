"""Compilation of the functions that run for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Decorator: `function` as machine code, cached on disk, run without the interpreter's lock.

    It borrows its arrays: without numba's reference counts (two atomic operations for each array of each inner call)
    a draft takes a third of the time. So it must not create arrays; callers lend it room.
    """
    return cast(Function, numba.njit(cache=True, nogil=True, _nrt=False)(function))
