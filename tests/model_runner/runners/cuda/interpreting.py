"""Makes the CUDA runner ready for a CPU: Triton interprets kernels, and steps are recorded in place of CUDA graphs.

Triton's interpreter replaces the functions of its language at each call of a device function, `tl.sum` among them,
which takes 8 ms; once for each launch is enough. It multiplies raw bits of bfloat16 and rounds to it towards zero. In
products of other types a row's bits depend on the other rows with some versions of BLAS. So parts of it are replaced
here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter

from draftwood_model_runner.runners.cuda.device import require_triton
from tests.model_runner.runners.cuda.device import DEVICE


class _Patched:
    """What the interpreter undoes at the end of a launch."""

    def __init__(self, active: set[str], scope: Any) -> None:
        self._active, self._scope = active, scope

    def restore(self) -> None:
        self._active.clear()
        self._scope.restore()


class _Nothing:
    def restore(self) -> None:
        pass


def _number(tensor: Any) -> int:
    """A scalar as a number: Triton 3.6 leaves it an array of one, which newer versions of NumPy do not convert."""
    return int(tensor.handle.data.item())


def _dot(builder: Any, left: Any, right: Any, total: Any, *options: Any) -> Any:
    """left @ right + total, [m, k], [k, n] and [m, n]: each number is summed up in the order of k, in its own type."""
    a, b = _values(left), _values(right)
    sums = total.data.copy()
    for k in range(a.shape[1]):
        sums += a[:, k, None] * b[k]
    return interpreter.TensorHandle(sums, total.dtype.scalar)


def _values(handle: Any) -> npt.NDArray[Any]:
    """float32 or float64[...]; the interpreter holds the bits of bfloat16 as integers."""
    data: npt.NDArray[Any] = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        return _widened(data).view(np.float32)
    return data.astype(np.float32) if data.dtype == np.float16 else data


def _widened(bits: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The bits of float32 numbers from those of bfloat16."""
    return bits.astype(np.uint32) << np.uint32(16)


def _rounded(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of bfloat16 numbers from float32, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    up = bits + (0x7FFF + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (np.where(np.isnan(numbers), bits | np.uint32(0x400000), up) >> np.uint32(16)).astype(np.uint16)


def _conversion(original: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's conversion of numbers, to and from bfloat16 by ours."""

    def converted(data: npt.NDArray[Any], source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            return _rounded(data)
        if (source, target) == (tl.bfloat16, tl.float32):
            return _widened(data.view(np.uint16))
        return original(data, source, target, rounding)

    return converted


def patch_interpreter() -> None:
    """Changes the interpreter of this process; may be called again. Leaves one alone that works in another way."""
    original = getattr(interpreter, "_patch_lang", None)
    if original is None or hasattr(original, "once"):
        return
    active: set[str] = set()

    def patch(function: Any) -> _Patched | _Nothing:
        modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        names = {module.__name__ for module in modules if module in (tl, tl.core)}
        if names <= active:
            return _Nothing()
        active.update(names)
        scope = original(function)
        scope.set_attr(tl.core.tensor, "__index__", _number)
        return _Patched(active, scope)

    patch.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._convert_float = _conversion(interpreter._convert_float)


def interpret() -> None:
    """For this process; may be called again.

    Raises:
        UnsupportedRunnerError: Triton is missing, or was imported to compile.
    """
    require_triton(DEVICE)
    if DEVICE.type == "cpu":
        # Kernels, which Triton must have been told to interpret.
        from draftwood_model_runner.runners.cuda.forward import CAPTURES
        from tests.model_runner.runners.cuda.recording import Recording

        patch_interpreter()
        CAPTURES["cpu"] = lambda forward: partial(Recording, forward)
