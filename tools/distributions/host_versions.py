"""Writes what vLLM and SGLang are installed with: `tests/distributions/hosts`, which `make hosts` makes anew.

pip resolves each from metadata, for this Python and system; nothing large is downloaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parents[2] / "tests/distributions/hosts"
HOSTS = ("vllm==0.32.*", "sglang==0.5.23")


def resolved(requirement: str) -> dict[str, str]:
    """Version by name of all that pip would install for a requirement."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), requirement], check=True)
        found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {canonicalize_name(one["name"]): one["version"].partition("+")[0] for one in found}


def main() -> None:
    for requirement in HOSTS:
        name, _, version = requirement.partition("==")
        lines = [f"{package}=={found}" for package, found in sorted(resolved(requirement).items())]
        heading = f"# What pip installs for {requirement}, with CPython 3.11 on Linux, x86-64 (`make hosts`)."
        (FOLDER / f"{name}-{version.removesuffix('.*')}.txt").write_text("\n".join([heading, *lines]) + "\n")


if __name__ == "__main__":
    main()
