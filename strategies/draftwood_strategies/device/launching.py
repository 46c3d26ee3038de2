"""Runs kernels: compiled by Triton on a GPU, by NumPy on a CPU.

Triton's own interpreter takes 0.1 ms for each operation, too long to replay recorded texts. On a CPU the source of a
kernel runs as it is, with the few functions of Triton's language that kernels here use in NumPy, one program after the
other; a test compares the bits with those of Triton's interpreter.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from draftwood_errors import DraftwoodError

_KERNELS = "draftwood_strategies.device.kernels."


class Launch(NamedTuple):
    """A kernel, by its name and its module in `kernels`, and what it is called with."""

    module: str
    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def compiled(self) -> Any:
        """The kernel in Triton's form: compiled, or interpreted if Triton was told so."""
        return getattr(importlib.import_module(_KERNELS + self.module), self.kernel)

    def run(self) -> None:
        """By Triton on a GPU, by NumPy on a CPU."""
        if self.arguments[0].device.type != "cpu":
            self.run_by_triton()
        else:
            self.run_by_numpy()

    def run_by_triton(self) -> None:
        self.compiled()[self.grid](*self.arguments, **self.constants)

    def run_by_numpy(self) -> None:
        function = _by_numpy(_KERNELS + self.module)[self.kernel]
        constants = {name: value for name, value in self.constants.items() if name != "num_warps"}
        taken = [_Pointer(_flat(each), 0) if hasattr(each, "data_ptr") else each for each in self.arguments]
        with np.errstate(all="ignore"):
            for program in product(*map(range, reversed(self.grid))):
                _Language.program = program[::-1]
                function(*taken, **constants)


LAUNCHER: ContextVar[Callable[[Launch], None]] = ContextVar("draftwood_device_launcher", default=Launch.run)
"""Called for each kernel."""


def launch(module: str, kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Runs a kernel on the current stream, or does what `LAUNCHER` says.

    Args:
        module: of `kernels`, by its name there.
        arguments: tensors of torch, of which the first is on the device, and numbers.
        constants: those that the kernel takes as `tl.constexpr`, and `num_warps`.
    """
    LAUNCHER.get()(Launch(module, kernel, grid, arguments, constants))


class DeviceUnsupportedError(DraftwoodError):
    """Kernels cannot be compiled for a device; the message gives the reason."""


def require_triton(device: Any) -> None:
    """Checks that kernels can run on a device of torch.

    Raises:
        DeviceUnsupportedError: Triton is missing on a GPU, or was imported to interpret kernels.
    """
    if device.type == "cpu":
        return
    try:
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise DeviceUnsupportedError(
            "device drafts: the package triton is not installed; torch for CUDA brings it"
        ) from error
    common = importlib.import_module(_KERNELS + "common")
    if not isinstance(common.mixed, JITFunction):
        raise DeviceUnsupportedError(f"device drafts: on {device} kernels run only without TRITON_INTERPRET=1")


def _flat(tensor: Any) -> np.ndarray[Any, Any]:
    assert tensor.is_contiguous()
    array: np.ndarray[Any, Any] = tensor.detach().numpy().reshape(-1)
    return array


@cache
def _by_numpy(module: str) -> dict[str, Any]:
    """The names in a module of kernels, whose imports of Triton and of other such modules are of their like here."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    source: str = spec.loader.get_source(module)  # type: ignore[attr-defined]
    code = compile(_Assigned().visit(ast.parse(source)), str(spec.origin), "exec")
    names: dict[str, Any] = {"__name__": module, "__builtins__": {**vars(builtins), "__import__": _imported}}
    exec(code, names)
    return names


class _Assigned(ast.NodeTransformer):
    """Writes `a += b` as `a = a + b`: NumPy's changes all that share the array, Triton's `a` alone."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        assert isinstance(node.target, ast.Name)
        before = ast.Name(node.target.id, ast.Load())
        return ast.fix_missing_locations(
            ast.copy_location(ast.Assign([node.target], ast.BinOp(before, node.op, node.value)), node)
        )


def _imported(name: str, *arguments: Any) -> Any:
    """In the place of `__import__`, see `_by_numpy`. A circle is not possible."""
    if name == "triton":
        return SimpleNamespace(jit=_jit, language=_Language)
    if name == "triton.language":
        return SimpleNamespace(language=_Language)
    if name.startswith(_KERNELS):
        return SimpleNamespace(**_by_numpy(name))
    return builtins.__import__(name, *arguments)


def _jit(function: Any = None, **_options: Any) -> Any:
    """In the place of `triton.jit`."""
    return _jit if function is None else function


class _Pointer:
    """Into a flat array."""

    def __init__(self, array: np.ndarray[Any, Any], at: Any) -> None:
        self.array, self.at = array, at

    def __add__(self, by: Any) -> _Pointer:
        return _Pointer(self.array, self.at + by)


class _Language:
    """The functions of `triton.language` that kernels here use; see there."""

    int32, int64, uint64, float32 = np.int32, np.int64, np.uint64, np.float32
    program: tuple[int, ...] = (0,)

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    @classmethod
    def program_id(cls, axis: int) -> Any:
        return np.int32(cls.program[axis])

    static_range = staticmethod(range)
    exp, log = staticmethod(np.exp), staticmethod(np.log)
    floor = staticmethod(np.floor)
    minimum, maximum = staticmethod(np.minimum), staticmethod(np.maximum)

    @staticmethod
    def where(condition: Any, value: Any, other: Any) -> Any:
        """Numbers of Python take the type of the other value, or 32 bits."""
        kind = np.float32 if float in (type(value), type(other)) else np.int32
        kinds = [each.dtype for each in (value, other) if hasattr(each, "dtype")]
        values = (each if hasattr(each, "dtype") else np.asarray(each, (*kinds, kind)[0]) for each in (value, other))
        return np.where(condition, *values)

    @staticmethod
    def arange(begin: int, end: int) -> Any:
        return np.arange(begin, end, dtype=np.int32)

    @staticmethod
    def reshape(value: Any, shape: Any) -> Any:
        return np.reshape(value, shape)

    @staticmethod
    def cast(value: Any, dtype: Any, bitcast: bool = False) -> Any:
        array = np.asarray(value, np.float32 if isinstance(value, float) else None)
        return array.view(dtype)[()] if bitcast else array.astype(dtype)[()]

    @staticmethod
    def load(pointer: _Pointer, mask: Any = None, other: Any = 0) -> Any:
        if mask is None:
            return pointer.array[pointer.at]
        at, mask = np.broadcast_arrays(pointer.at, mask)
        if mask.ndim == 0:
            return pointer.array[at] if mask else pointer.array.dtype.type(other)
        loaded = np.broadcast_to(np.asarray(other, pointer.array.dtype), at.shape).copy()
        loaded[mask] = pointer.array[at[mask]]
        return loaded

    @staticmethod
    def store(pointer: _Pointer, value: Any, mask: Any = None) -> None:
        if mask is None:
            pointer.array[pointer.at] = value
            return
        at, given, taken = np.broadcast_arrays(pointer.at, value, mask)
        pointer.array[at[taken]] = given[taken]

    @staticmethod
    def atomic_add(pointer: _Pointer, value: Any, mask: Any = True) -> None:
        at, given, taken = np.broadcast_arrays(pointer.at, value, mask)
        np.add.at(pointer.array, at[taken], given[taken])

    @staticmethod
    def atomic_max(pointer: _Pointer, value: Any, mask: Any = True) -> None:
        at, given, taken = np.broadcast_arrays(pointer.at, value, mask)
        np.maximum.at(pointer.array, at[taken], given[taken])

    @staticmethod
    def sum(value: Any, axis: int) -> Any:
        """In float32, as on a GPU; in the order of the lanes."""
        return np.sum(value, axis=axis, dtype=np.int32 if value.dtype == np.bool_ else value.dtype)

    @staticmethod
    def max(value: Any, axis: int) -> Any:
        return np.max(value, axis=axis)

    @staticmethod
    def min(value: Any, axis: int) -> Any:
        return np.min(value, axis=axis)

    @staticmethod
    def cumsum(value: Any, axis: int) -> Any:
        return np.cumsum(value, axis=axis, dtype=value.dtype)

    @staticmethod
    def debug_barrier() -> None:
        """One program after the other, and one lane after the other: nothing is to be waited for."""
