"""The distributions of the workspace, their wheels, and environments that hold one of them with its dependencies."""

from __future__ import annotations

import os
import subprocess
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import distribution
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.distributions.lock import ROOT, projects

FOLDERS = {project["name"]: ROOT / folder for folder, project in projects().items()}
"""Of each distribution, by its name."""
MODULES = {
    "draftwood": {"draftwood_service"},
    "draftwood-benchmarks": {"draftwood_benchmarks"},
    "draftwood-client": {"draftwood", "draftwood_client", "draftwood_command.py"},
    "draftwood-memory": {"draftwood_memory"},
    "draftwood-model-runner": {"draftwood_model_runner"},
    "draftwood-strategies": {"draftwood_errors", "draftwood_strategies"},
    "draftwood-tenants": {"draftwood_tenants"},
    "draftwood-sglang": {"draftwood_sglang"},
    "draftwood-vllm": {"draftwood_vllm"},
}
"""What each installs at the top level."""


@dataclass(frozen=True)
class Wheel:
    path: Path

    @classmethod
    def build(cls, source: Path, into: Path) -> Wheel:
        return cls(Path(next(WheelBuilder(str(source)).build(directory=str(into)))))

    @cached_property
    def files(self) -> frozenset[str]:
        """Without those that describe the distribution."""
        with zipfile.ZipFile(self.path) as archive:
            return frozenset(name for name in archive.namelist() if ".dist-info/" not in name)

    def information(self, name: str) -> str:
        """A file that describes the distribution; "" if there is none of that name."""
        with zipfile.ZipFile(self.path) as archive:
            found = [member for member in archive.namelist() if member.partition(".dist-info/")[2] == name]
            return archive.read(found[0]).decode() if found else ""

    @cached_property
    def metadata(self) -> Metadata:
        return Metadata.from_email(self.information("METADATA"))

    def install(self, site: Path) -> None:
        with zipfile.ZipFile(self.path) as archive:
            archive.extractall(site)


def required(requirements: Iterable[Requirement], extras: Iterable[str] = ()) -> list[Requirement]:
    """Those that hold here, with some extras."""
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments))
    ]


def with_dependencies(wanted: Iterable[Requirement]) -> set[str]:
    """The installed distributions that requirements need, with all that those need."""
    found: set[str] = set()
    waiting = list(wanted)
    while waiting:
        one = waiting.pop()
        key = f"{canonicalize_name(one.name)}[{','.join(sorted(one.extras))}]"
        if key not in found:
            found.add(key)
            of_it = [Requirement(text) for text in distribution(one.name).requires or ()]
            waiting += required(of_it, one.extras)
    return {key.partition("[")[0] for key in found}


def environment(folder: Path, wheels: Iterable[Wheel], extras: Iterable[str] = ()) -> Path:
    """The Python of a virtual environment with wheels and links to what they need of others."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    third_party = []
    for wheel in wheels:
        wheel.install(site)
        needed = required(wheel.metadata.requires_dist or [], extras)
        third_party += [one for one in needed if one.name not in FOLDERS]
    for name in with_dependencies(third_party):
        link(name, site)
    return folder / "bin" / "python"


def link(name: str, site: Path) -> None:
    """Links the top-level files and folders of an installed distribution into another environment."""
    found = distribution(name)
    for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        if not (site / top).exists():
            os.symlink(str(found.locate_file(top)), site / top)


def run(python: Path, code: str, *arguments: str, status: int = 0) -> str:
    """What a program prints, on both of its outputs."""
    command = [str(python), "-I", "-c", code, *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def present(python: Path, *modules: str) -> list[str]:
    """Those of the modules that an environment has."""
    code = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if u.find_spec(name)])"
    return run(python, code, *modules).split()
