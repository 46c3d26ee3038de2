"""The lock file has what the distributions and the development tools require, for CI's Python, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, version
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.pylock import Pylock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distributions.workspace import required, with_dependencies
from tools.distributions.lock import LOCK, ROOT, TORCH_NEEDS, projects, requirements, without_torch
from tools.distributions.locked_versions import constraints

TEXT = LOCK.read_text()
PACKAGES: list[dict[str, Any]] = tomllib.loads(TEXT)["packages"]
LOCKED = {package["name"]: package["version"] for package in PACKAGES}


HERE = {
    package["name"]: package["version"]
    for package in PACKAGES
    if "marker" not in package or Marker(package["marker"]).evaluate()
}


def test_it_has_all_that_distributions_and_tools_need_and_nothing_else() -> None:
    wanted = required(requirements())
    locked = [(one, LOCKED.get(canonicalize_name(one.name), "0")) for one in (*wanted, *map(Requirement, TORCH_NEEDS))]
    assert [f"{one}: {version}" for one, version in locked if version not in one.specifier] == []
    elsewhere = {"triton"} & LOCKED.keys() - HERE.keys()
    assert with_dependencies(wanted) - elsewhere == HERE.keys()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11) or sys.platform != "linux", reason="CI's Python and system")
def test_it_is_what_is_installed() -> None:
    assert {name: version(name) for name in HERE} == HERE


def test_it_is_a_standard_lock_file_with_hashes_and_public_addresses() -> None:
    lock = Pylock.from_dict(tomllib.loads(TEXT))
    assert (str(lock.lock_version), len(lock.packages)) == ("1.0", len(LOCKED))
    files = [
        file
        for package in PACKAGES
        for file in [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]
    ]
    assert all(re.fullmatch("[0-9a-f]{64}", file["hashes"]["sha256"]) for file in files)
    hosts = {file["url"].split("/")[2] for file in files}
    assert hosts == {"files.pythonhosted.org", "download.pytorch.org"}
    other_systems = re.compile(r"-(win|musllinux|pp\d|cp\d+t-)")
    assert [file["url"] for file in files if other_systems.search(file["url"].rpartition("/")[2])] == []


def test_torch_is_the_build_for_cpus_and_what_it_needs_is_locked_by_hand() -> None:
    assert LOCKED["torch"].endswith("+cpu")
    assert not [name for name in LOCKED if name.startswith(("nvidia-", "cuda-"))]
    if "+cpu" in version("torch"):
        needed = required(Requirement(text) for text in distribution("torch").requires or ())
        assert {one.name.lower() for one in needed} == {Requirement(text).name for text in TORCH_NEEDS}
    assert without_torch(TEXT).count('name = "torch"') == 0


def test_the_image_gets_the_locked_versions() -> None:
    command = [sys.executable, "-I", str(ROOT / "tools/distributions/locked_versions.py"), str(LOCK)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == constraints(LOCK)
    assert "torch==2.13.0" in printed
    assert {line.partition("==")[0] for line in printed} == LOCKED.keys() - {"triton"}


def test_the_workspace_has_every_distribution() -> None:
    found = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/pyproject.toml")}
    assert found | {"clients/python", "plugins/sglang", "plugins/vllm"} == projects().keys()
    sources = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["sources"]
    assert sources == {project["name"]: {"workspace": True} for project in projects().values()}
