"""Compilation of the functions that run for every token, and the types that they take."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import caching as numba_caching

Integer: TypeAlias = int | np.integer[Any]
"""A whole number: an int in Python, any width of it in compiled code."""
Real: TypeAlias = float | np.floating[Any]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]

_njit: Any = numba.njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Decorator: `function` as machine code, cached on disk, run without the interpreter's lock.

    It borrows its arrays: without numba's reference counts (two atomic operations for each array of each inner call)
    a draft takes a third of the time. So it must not create arrays; callers lend it a workspace. Other compiled
    functions pass it named tuples of arrays at no cost, as it becomes part of them: a call with the 170 values of a
    trie's arrays cost up to 50 ns, and a draft makes hundreds. Python passes the address of a `structs.Struct`.
    """
    dispatcher: Any = _njit(nogil=True, _nrt=False, forceinline=True)(function)
    if hasattr(dispatcher, "_cache"):  # not where compilation is disabled
        dispatcher._cache = _Cache(function)
    return cast(Function, dispatcher)


_caching: Any = numba_caching


class _Cache(_caching.FunctionCache):  # type: ignore[misc]
    """numba's cache on disk, in files that are named by what a function may be made of.

    numba compares the function's own file only, but machine code contains functions of other files, and the layout of
    their named tuples, and loading it imports these. So after an update of the package it would go on with what is
    outdated, or fail to load.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._base = self._impl.filename_base
        packages = {__package__, function.__module__.partition(".")[0]}
        self._sources = "".join(_hash_of_sources(package) for package in sorted(packages))
        self._cache_file = _caching.IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=f"{self._base}.{self._sources}",
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def save_overload(self, signature: Any, data: Any) -> None:
        """Saves what was compiled; what the same function was in earlier versions goes."""
        for path in Path(self._cache_path).glob(f"{escape(self._base)}.*"):
            if f".{self._sources}." not in path.name:
                path.unlink(missing_ok=True)
        super().save_overload(signature, data)


@lru_cache
def _hash_of_sources(package: str) -> str:
    """Of the modules of a package, as they are on disk."""
    module, found = import_module(package), hashlib.sha256()
    for folder in module.__path__ if hasattr(module, "__path__") else []:
        for path in sorted(Path(folder).rglob("*.py")):
            found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


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
