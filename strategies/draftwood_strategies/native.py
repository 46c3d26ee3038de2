"""Compilation of the functions that run for every token, and the types that they take."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, wraps
from glob import escape
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast, get_type_hints

import numba
import numpy as np
import numpy.typing as npt
from numba.core import caching as numba_caching
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np import arrayobj

Integer: TypeAlias = int | np.integer[Any]
"""A whole number: an int in Python, any width of it in compiled code."""
Real: TypeAlias = float | np.floating[Any]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]

_njit: Any = numba.njit

Function = TypeVar("Function", bound=Callable[..., object])
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Function) -> Function:
    """Decorator: `function` as machine code, cached on disk, run without the interpreter's lock.

    It borrows its arrays: without numba's reference counts (two atomic operations for each array of each inner call)
    a draft takes a third of the time. So it must not create arrays; callers lend it a workspace. From other compiled
    functions it takes named tuples at no cost; Python hands them over through `flattened`.
    """
    dispatcher: Any = _njit(nogil=True, _nrt=False)(function)
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


def flattened(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A `compiled` function for callers in Python, which pass its named tuples as they are.

    numba recognizes arrays in C code, but named tuples in Python code: of a trie's draft with nothing to draft, 30
    arrays, 1.9 us where they are passed one by one, 5.6 us in their tuples, 2.4 us through this. It makes two functions
    out of the annotations of `function`: one in Python that takes the named tuples apart, nested ones too, and a
    compiled one that puts them together again, which costs nothing there. The latter is cached beside the module of
    `function`, like any compiled function.
    """
    python = cast(Any, function).py_func
    kinds = get_type_hints(python)
    parameters = [*signature(python).parameters]
    namespace: dict[str, Any] = {"__name__": python.__module__, "function": function}
    name = f"{python.__name__}_flattened"
    leaves = ", ".join(leaf for name in parameters for leaf in _leaves(name, kinds[name]))
    rebuilt = ", ".join(_rebuilt(name, kinds[name], namespace) for name in parameters)
    apart = ", ".join(_taken_apart(name, kinds[name]) for name in parameters)
    _define(f"def {name}({leaves}):\n    return function({rebuilt})\n", python, namespace)
    namespace[name].__qualname__ = name
    namespace[name] = compiled(namespace[name])
    _define(f"def call({', '.join(parameters)}):\n    return {name}({apart})\n", python, namespace)
    return cast(Callable[Parameters, Result], wraps(python)(namespace["call"]))


def sizes_between(begins: Int32Array) -> Int32Array:
    """int32[s], the sizes of runs that begin at `begins`, int32[s + 1]; `np.diff` takes five times as long."""
    return begins[1:] - begins[:-1]


def runs_in(begins: Int32Array, chosen: Sequence[int]) -> tuple[Int64Array, Int32Array]:
    """Where the entries of some runs are, int64[n], and where each run begins among these, int32[len(chosen) + 1].

    Args:
        begins: int32[s + 1], where all runs begin.
    """
    rows = np.array(chosen, np.int64)
    starts, of_chosen = begins[rows], np.zeros(rows.shape[0] + 1, np.int32)
    sizes = begins[rows + 1] - starts
    np.cumsum(sizes, out=of_chosen[1:])
    return np.arange(of_chosen[-1]) + np.repeat(starts - of_chosen[:-1], sizes), of_chosen


def address_of(array: npt.NDArray[Any]) -> int:
    """Where the data of a contiguous array lies, which stays there while the array lives."""
    return int(array.__array_interface__["data"][0])


def _view_of(kind: Any, dimensions: int) -> Any:
    """An intrinsic that makes an array out of an address and its shape; see `int32s`.

    Not `numba.carray`, a function, since functions without reference counts may return no array.
    """

    arrays: Any = arrayobj

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = arrays.make_array(signature.return_type)(context, builder)
        item_size = context.get_abi_sizeof(context.get_data_type(kind))
        address, shape = arguments[0], list(arguments[1:])
        strides = [context.get_constant(types.intp, item_size)]
        for extent in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], extent))
        arrays.populate_array(
            array,
            data=builder.inttoptr(address, context.get_data_type(kind).as_pointer()),
            shape=shape,
            strides=strides,
            itemsize=item_size,
            meminfo=None,
        )
        return array._getvalue()

    if dimensions == 1:

        def view(typing_context: Any, address: Any, size: Any) -> Any:
            return types.Array(kind, 1, "C")(types.intp, types.intp), generate

    else:

        def view(typing_context: Any, address: Any, rows: Any, columns: Any) -> Any:  # type: ignore[misc]
            return types.Array(kind, 2, "C")(types.intp, types.intp, types.intp), generate

    return intrinsic(view)


int32s: Callable[[Integer, Integer], Int32Array] = _view_of(types.int32, 1)
"""In compiled code: the array at an address (`address_of`) with so many entries, so that one call can work on arrays of
many sequences. Compiled functions cannot return it."""
int32_rows: Callable[[Integer, Integer, Integer], Int32Array] = _view_of(types.int32, 2)
"""As `int32s`, with so many rows and columns."""
int64s: Callable[[Integer, Integer], Int64Array] = _view_of(types.int64, 1)
"""As `int32s`."""
int64_rows: Callable[[Integer, Integer, Integer], Int64Array] = _view_of(types.int64, 2)
"""As `int32_rows`."""
float32s: Callable[[Integer, Integer], Float32Array] = _view_of(types.float32, 1)
"""As `int32s`."""
float64s: Callable[[Integer, Integer], Float64Array] = _view_of(types.float64, 1)
"""As `int32s`."""
float32_rows: Callable[[Integer, Integer, Integer], Float32Array] = _view_of(types.float32, 2)
"""As `int32_rows`."""


@compiled
def copy_draft(
    token_address: Integer,
    parent_address: Integer,
    score_address: Integer,
    n: Integer,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    begin: Integer,
) -> None:
    """Copies a draft of n nodes, at these addresses, into flat arrays from `begin` on."""
    drafted, above, scored = int32s(token_address, n), int32s(parent_address, n), float32s(score_address, n)
    for node in range(n):
        tokens[begin + node], parents[begin + node], scores[begin + node] = drafted[node], above[node], scored[node]


@intrinsic
def _prefetch(typing_context: Any, array: Any, offset: Any) -> Any:
    arrays: Any = arrayobj
    utilities: Any = cgutils

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = arrays.make_array(signature.args[0])(context, builder, arguments[0]).data
        ir = utilities.ir  # of llvmlite
        line = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [line.type, word, word, word])
        function = utilities.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [line, word(0), word(3), word(1)])  # to be read, again and again, as data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


prefetch: Callable[[Int32Array, Integer], None] = cast(Any, _prefetch)
"""In compiled code: begins to load the entry of an array that is that far behind its first one. It need not lie in the
array."""


def _define(source: str, python: Any, namespace: dict[str, Any]) -> None:
    """Runs a definition as if it stood in the file of `python`, where numba looks for the cache."""
    exec(compile(source, python.__code__.co_filename, "exec"), namespace)


def _fields(kind: Any) -> dict[str, Any]:
    """The fields of a class of named tuples and their types; none of any other type."""
    is_named_tuple = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return get_type_hints(kind) if is_named_tuple else {}


def _leaves(name: str, kind: Any) -> Iterator[str]:
    """Names for the arrays and numbers in a value: "own_log", "own_links", ..."""
    if not _fields(kind):
        yield name
    for field, inner in _fields(kind).items():
        yield from _leaves(f"{name}_{field}", inner)


def _rebuilt(name: str, kind: Any, namespace: dict[str, Any]) -> str:
    """The expression that makes a value of its leaves; puts the classes that it needs into the namespace."""
    if not _fields(kind):
        return name
    namespace[f"{kind.__name__}_of_{name}"] = kind
    fields = ", ".join(_rebuilt(f"{name}_{field}", inner, namespace) for field, inner in _fields(kind).items())
    return f"{kind.__name__}_of_{name}({fields})"


def _taken_apart(expression: str, kind: Any) -> str:
    """The expression that passes the leaves of a value: "*own", or "*trees[0], trees[1]"."""
    fields = _fields(kind)
    if not fields:
        return expression
    if not any(map(_fields, fields.values())):
        return f"*{expression}"
    return ", ".join(_taken_apart(f"{expression}[{at}]", inner) for at, inner in enumerate(fields.values()))
