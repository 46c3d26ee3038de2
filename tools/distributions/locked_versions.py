"""Prints a lock file as constraints for pip, for an environment that needs a part of it: `locked_versions.py FILE`.

torch is without its kind of build, so that the one for CUDA fits too. That one requires a version of triton of its own.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def constraints(lock: Path) -> list[str]:
    packages = tomllib.loads(lock.read_text())["packages"]
    versions = {package["name"]: package["version"].partition("+")[0] for package in packages}
    return [f"{name}=={version}" for name, version in versions.items() if name != "triton"]


if __name__ == "__main__":
    print("\n".join(constraints(Path(sys.argv[1]))))
