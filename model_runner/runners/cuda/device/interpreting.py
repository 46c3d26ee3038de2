"""Makes Triton's interpreter several times faster, for tests on CPUs.

It replaces the functions of Triton's language at each call of a device function, `tl.sum` among them, which takes 8 ms;
once for each launch is enough.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


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


def patch_once_a_launch() -> None:
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
        return _Patched(active, original(function))

    patch.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch
