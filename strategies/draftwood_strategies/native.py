"""Compilation of the functions that run for every token, and the structs that Python shares with them.

A struct is a named tuple of arrays, or a record, that compiled code finds by its address. numba takes an array from
Python in 60 ns and a named tuple in microseconds; a draft of the trie reads 30 arrays. So Python passes addresses, and
compiled code reads from them what the class of the named tuple, or the dtype of the record, says is there.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from glob import escape
from importlib import import_module
from operator import gt
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

import numba
import numpy as np
import numpy.typing as npt
from numba.core import caching as numba_caching
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np import arrayobj, numpy_support

from draftwood_strategies.arrays import Int64Array, Integer

_njit: Any = numba.njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Decorator: `function` as machine code, cached on disk, run without the interpreter's lock.

    It borrows its arrays: without numba's reference counts (two atomic operations for each array of each inner call)
    a draft takes a third of the time. So it must not create arrays; callers lend it a workspace. Other compiled
    functions pass it named tuples of arrays at no cost, as it becomes part of them: a call with the 170 values of a
    trie's arrays cost up to 50 ns, and a draft makes hundreds. Python passes the address of a `Struct`.
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
    module, digest = import_module(package), hashlib.sha256()
    for folder in module.__path__ if hasattr(module, "__path__") else []:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


Fields = TypeVar("Fields", bound=tuple[Any, ...])
Number = TypeVar("Number", bound=np.generic)

_arrays: Any = arrayobj
_types: Any = types
_numpy_support: Any = numpy_support
_cgutils: Any = cgutils


def record_dtype(**fields: type[np.generic]) -> np.dtype[np.void]:
    """The dtype of a record with these fields, aligned as in C. Compiled code reads `record.field`."""
    return np.dtype([*fields.items()], align=True)


def address_of(array: npt.NDArray[Any]) -> int:
    """Where the data of a contiguous array lies, which stays there while the array lives."""
    return int(array.ctypes.data)


def addresses_of(structs: Sequence[Struct[Any] | None]) -> Int64Array:
    """int64[s], the addresses of some structs; 0 for None."""
    return np.array([struct.address if struct else 0 for struct in structs], np.int64)


class Struct(Generic[Fields]):
    """A named tuple of arrays, which it keeps alive, and the address by which compiled code finds them (`arrays_at`).

    The class of the tuple declares what its fields are: `Int32Array` is an array of one dimension,
    `Annotated[Int32Array, 2]` one of two, `Annotated[Any, dtype]` one of records, and a class of named tuples
    is a struct in the struct.
    """

    def __init__(self, fields: Fields) -> None:
        self._declared = _declared(type(fields))
        self._layout = np.empty(sum(1 + dimensions for _, dimensions in self._declared), np.int64)
        self.address = address_of(self._layout)
        self.set(fields)

    def set(self, fields: Fields) -> None:
        """Other arrays, of the same types, are at this address from now on."""
        self.fields = fields
        at: list[int] = []
        for array, declared in zip(_flat(fields), self._declared, strict=True):
            assert (array.dtype, array.ndim) == declared
            assert array.flags.c_contiguous
            at += (address_of(array), *array.shape)
        self._layout[:] = at


class Workspaces(Generic[Fields]):
    """The scratch arrays of compiled calls: a workspace for each thread, made anew where a call needs a larger one.

    Args:
        make: makes a workspace of some sizes.
        smallest: the sizes of the smallest one.
    """

    def __init__(self, make: Callable[..., Fields], *smallest: int) -> None:
        self._make = make
        self._smallest = smallest
        self._thread = threading.local()

    def address(self, *sizes: int) -> int:
        """The address of this thread's workspace, of these sizes or larger ones."""
        had: tuple[int, ...] | None = getattr(self._thread, "sizes", None)
        if had is None or any(map(gt, sizes, had)):
            self._thread.sizes = (*map(max, sizes, had or self._smallest),)
            self._thread.struct = Struct(self._make(*self._thread.sizes))
        struct: Struct[Fields] = self._thread.struct
        return struct.address


def _flat(fields: tuple[Any, ...]) -> Iterator[npt.NDArray[Any]]:
    for field in fields:
        if isinstance(field, tuple):
            yield from _flat(field)
        else:
            yield field


@lru_cache
def _fields_of(kind: type) -> dict[str, Any]:
    """The types of a named tuple's fields in compiled code: of an array, or the class of a struct in the struct."""
    return {name: _type_of(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _type_of(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, tuple):
        return hint
    notes: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *annotated = get_args(hint)
        notes = tuple(annotated)
    dimensions = next((note for note in notes if isinstance(note, int)), 1)
    dtype = next((note for note in notes if isinstance(note, np.dtype)), None)
    if dtype is None:
        dtype = np.dtype(_scalar_of(hint))
    return types.Array(_numpy_support.from_dtype(dtype), dimensions, "C")


def _scalar_of(array: Any) -> Any:
    """The scalar type of an `npt.NDArray`, which is a type before NumPy 2.5, and an alias of one from then on."""
    last = get_args(array)[-1]
    return next(iter(get_args(last)), last)


@lru_cache
def _declared(kind: type) -> list[tuple[np.dtype[Any], int]]:
    """The dtype and the dimensions of each array of a named tuple, and of those in it."""
    return [(_numpy_support.as_dtype(leaf.dtype), leaf.ndim) for leaf in _leaves_of(kind)]


def _leaves_of(kind: type) -> Iterator[Any]:
    for field in _fields_of(kind).values():
        if isinstance(field, type):
            yield from _leaves_of(field)
        else:
            yield field


def _tuple_type(kind: type) -> Any:
    fields = [_tuple_type(field) if isinstance(field, type) else field for field in _fields_of(kind).values()]
    return _types.BaseTuple.from_types(fields, kind)


@intrinsic
def _arrays_at(typing_context: Any, kind: Any, address: Any) -> Any:
    tuple_type = _tuple_type(kind.instance_class)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = context.get_value_type(types.intp)
        layout = builder.inttoptr(arguments[1], word.as_pointer())
        read = 0

        def next_word() -> Any:
            nonlocal read
            read += 1
            return builder.load(builder.gep(layout, [context.get_constant(types.intp, read - 1)]))

        def array_of(kind: Any) -> Any:
            array = _arrays.make_array(kind)(context, builder)
            data = context.get_data_type(kind.dtype)
            item_size = context.get_abi_sizeof(data)
            address, shape = next_word(), [next_word() for _ in range(kind.ndim)]
            strides = [context.get_constant(types.intp, item_size)]
            for extent in reversed(shape[1:]):
                strides.insert(0, builder.mul(strides[0], extent))
            _arrays.populate_array(
                array,
                data=builder.inttoptr(address, data.as_pointer()),
                shape=shape,
                strides=strides,
                itemsize=item_size,
                meminfo=None,
            )
            return array._getvalue()

        def tuple_of(kind: Any) -> Any:
            values = [
                tuple_of(field) if isinstance(field, types.BaseTuple) else array_of(field) for field in kind.types
            ]
            return context.make_tuple(builder, kind, values)

        return tuple_of(tuple_type)

    return tuple_type(kind, types.intp), generate


@intrinsic
def _record_at(typing_context: Any, dtype: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[1], context.get_value_type(signature.return_type))

    return dtype.dtype(dtype, types.intp), generate


@intrinsic
def _copy_record(typing_context: Any, target: Any, source: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _cgutils.raw_memcpy(builder, *arguments, context.get_constant(types.intp, signature.args[0].size), 1)
        return context.get_dummy_value()

    return types.void(target, source), generate


@intrinsic
def _prefetch(typing_context: Any, array: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        ir = _cgutils.ir  # of llvmlite
        of_array = _arrays.make_array(signature.args[0])(context, builder, arguments[0])
        begin = builder.ptrtoint(of_array.data, ir.IntType(64))
        item_size = context.get_constant(
            types.intp, context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        )
        line = builder.inttoptr(builder.add(begin, builder.mul(arguments[1], item_size)), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [line.type, word, word, word])
        function = _cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [line, word(0), word(3), word(1)])  # to be read, again and again, as data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


arrays_at = cast(Callable[[type[Fields], Integer], Fields], _arrays_at)
"""In compiled code: the named tuple of arrays at the address of a `Struct`. Compiled functions cannot return it."""
record_at = cast(Callable[[np.dtype[np.void], Integer], Any], _record_at)
"""In compiled code: the record at an address, of an array of this dtype (`record_dtype`)."""
copy_record = cast(Callable[[Any, Any], None], _copy_record)
"""In compiled code: copies the second record into the first one, of the same dtype. An assignment would copy byte by
byte."""
prefetch = cast(Callable[[npt.NDArray[Any], Integer], None], _prefetch)
"""In compiled code: begins to load the entry of an array that is that far behind its first one. It need not lie in the
array."""
