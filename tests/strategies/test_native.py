"""Compiled functions on disk: never those of an earlier version of the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_INNER = """
from typing import NamedTuple
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.native import compiled

class Pair(NamedTuple):
    {fields}

@compiled
def inner(pair: Pair) -> int:
    return pair.{field}[0] + {added}
"""
_OUTER = """
from draftwood_strategies.native import compiled
from draftwood_strategies.native import arrays_at
from {module} import Pair, inner

@compiled
def outer(address: int) -> int:
    return 10 * inner(arrays_at(Pair, address))
"""
_RUN = """
import numpy as np
from draftwood_strategies.native import Struct
from versions.{module} import Pair
from versions.outer import outer
pair = Struct(Pair(np.full(1, 2, np.int32), np.full(1, 5, np.int32)))
print(outer(pair.address))
"""


def _run(folder: Path, module: str, fields: str, field: str, added: int) -> int:
    """What the package's function returns as this version; `outer.py` is written once for each module's name."""
    package = folder / "versions"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / f"{module}.py").write_text(_INNER.format(fields=fields, field=field, added=added), encoding="utf-8")
    outer, text = package / "outer.py", _OUTER.format(module=f"versions.{module}")
    if not outer.exists() or outer.read_text(encoding="utf-8") != text:
        outer.write_text(text, encoding="utf-8")
    os.utime(outer, (1e9, 1e9))  # its own file says nothing of what it calls
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # by time and size, an old one would do
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(module=module)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.system
def test_machine_code_is_never_that_of_an_earlier_version(tmp_path: Path) -> None:
    """numba looks at the file of the outer function only, whose machine code contains the inner one."""
    both = "first: Int32Array\n    second: Int32Array"
    swapped = "second: Int32Array\n    first: Int32Array"
    assert _run(tmp_path, "inner", both, "first", added=1) == 30
    before = {path.name for path in (tmp_path / "versions/__pycache__").glob("outer.*.nb?")}
    assert before
    assert _run(tmp_path, "inner", both, "first", added=1) == 30
    assert {path.name for path in (tmp_path / "versions/__pycache__").glob("outer.*.nb?")} == before, "found again"
    assert _run(tmp_path, "inner", both, "first", added=2) == 40
    assert _run(tmp_path, "inner", swapped, "first", added=2) == 70, "the layout of a named tuple changed"
    (tmp_path / "versions/inner.py").unlink()
    assert _run(tmp_path, "moved", both, "first", added=2) == 40, "what is loaded names a module that is gone"
    after = {path.name for path in (tmp_path / "versions/__pycache__").glob("outer.*.nb?")}
    assert after.isdisjoint(before)
    assert len(after) == len(before), "earlier versions are deleted"
