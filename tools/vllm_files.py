"""Unpacks the Python files of a version of vLLM, and nothing compiled: for `tests/vllm/test_versions.py`.

`python -m tools.vllm_files VERSION FOLDER` downloads 300 MB and keeps 30 MB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile


def unpack(version: str, folder: Path) -> None:
    """Puts the package `vllm` into a folder. Raises CalledProcessError: pip does not find the version."""
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", downloads, f"vllm=={version}"], check=True)
        [wheel] = Path(downloads).glob("*.whl")
        with ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith((".py", "/METADATA"))])


if __name__ == "__main__":
    unpack(sys.argv[1], Path(sys.argv[2]))
