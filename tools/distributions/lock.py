"""Writes `pylock.toml`: what `make setup`, CI and the image install, by uv. `make lock` runs it.

Versions that are locked stay, unless `--upgrade` asks for newer ones. The lock is for Linux and macOS. Of torch it has
the build for CPUs alone: PyPI's brings 3 GB of CUDA on Linux.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "pylock.toml"
OLDEST_PYTHON = "3.11.5"
"""pymdown-extensions, a development tool, needs it."""
TORCH = """
[[packages]]
name = "torch"
version = "2.13.0+cpu"
marker = "python_full_version < '3.12' and platform_machine == 'x86_64' and sys_platform == 'linux'"
wheels = [{ name = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", \
url = "https://download.pytorch.org/whl/cpu/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl", \
hashes = { sha256 = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b" } }]
"""
"""Elsewhere the last step of `make setup` takes torch from the index."""
TORCH_NEEDS = (
    "filelock",
    "fsspec>=0.8.5",
    "jinja2",
    "networkx>=2.5.1",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "typing-extensions>=4.10.0",
)
ELSEWHERE = {"vllm"}
"""Extras that are installed in an environment of their own: vLLM brings a build of torch."""
_WHEEL_LINE = re.compile(r'^    \{ url = "[^"]*/([^"/]+\.whl)"')
_UNNEEDED_FIELDS = re.compile(r", (upload-time = [^,}]+|size = \d+)(?=[, }])")


def projects() -> dict[str, dict[str, Any]]:
    """The table `project` of each distribution of the workspace, by its folder."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    members = root["tool"]["uv"]["workspace"]["members"]
    return {name: tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"] for name in members}


def requirements() -> Iterator[Requirement]:
    """What the distributions, with all of their extras but `ELSEWHERE`, and the development tools require of others."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    all_projects = projects().values()
    of_projects = [
        one
        for project in all_projects
        for extra, group in {"": project["dependencies"], **project.get("optional-dependencies", {})}.items()
        for one in group
        if extra not in ELSEWHERE
    ]
    ours = {project["name"] for project in all_projects}
    for text in dict.fromkeys([*of_projects, *root["dependency-groups"]["dev"]]):
        if (required := Requirement(text)).name not in ours:
            yield required


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    upgrade = parser.parse_args().upgrade
    with tempfile.TemporaryDirectory() as folder:
        resolved = Path(folder, "pylock.toml")
        if LOCK.exists() and not upgrade:
            resolved.write_text(without_torch(LOCK.read_text()))
        resolve(resolved)
        LOCK.write_text(made_small(resolved.read_text()) + TORCH)


def resolve(output: Path) -> None:
    """Resolves for all platforms, without torch and what it brings."""
    folder = output.parent
    (folder / "requirements.in").write_text("\n".join([*map(str, requirements()), *TORCH_NEEDS]))
    (folder / "excluded.txt").write_text("torch\n")
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "compile", "--no-config", "--quiet", "--universal", "--python-version", OLDEST_PYTHON]
    command += ["--default-index", "https://pypi.org/simple", "--excludes", "excluded.txt", "--no-header"]
    command += ["--output-file", output.name, "requirements.in"]
    subprocess.run(command, cwd=folder, check=True)


def without_torch(lock: str) -> str:
    return lock.removesuffix(TORCH)


def made_small(lock: str) -> str:
    """Without the wheels of systems that Draftwood does not run on, and fields that only inform."""
    kept = (line for line in lock.replace("%21", "!").splitlines() if not _is_elsewhere(line))
    return "\n".join(_UNNEEDED_FIELDS.sub("", line) for line in kept) + "\n"


def _is_elsewhere(line: str) -> bool:
    """Whether a line of the lock is a wheel for another interpreter or system."""
    found = _WHEEL_LINE.match(line)
    if found is None:
        return False
    try:
        tags = parse_wheel_filename(found[1].replace("%2B", "+"))[3]
    except InvalidWheelFilename:
        return True
    return not any(
        re.fullmatch(r"py3|py2|cp3\d|cp31[0-4]", tag.interpreter)
        and (tag.abi in ("none", "abi3", tag.interpreter))
        and re.fullmatch(r"any|manylinux.*_(x86_64|aarch64)|macosx_.*_(arm64|universal2|x86_64)", tag.platform)
        and (tag.abi != tag.interpreter or tag.interpreter in ("cp311", "cp312", "cp313", "cp314"))
        for tag in tags
    )


if __name__ == "__main__":
    main()
