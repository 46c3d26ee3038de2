"""The distribution draftwood-client: what it installs, and that it works without anything of the server."""

from __future__ import annotations

import email
import os
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
CLIENT = REPOSITORY / "clients" / "python"
STUBS = {
    path.relative_to(REPOSITORY / "protos").as_posix()
    for path in (REPOSITORY / "protos/draftwood").rglob("*")
    if path.suffix in (".proto", ".py", ".pyi")
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(next(WheelBuilder(str(CLIENT)).build(directory=str(tmp_path_factory.mktemp("wheel")))))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(next(SdistBuilder(str(CLIENT)).build(directory=str(folder)))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_it_brings_the_client_and_the_stubs_and_nothing_else(wheel: Path) -> None:
    names = contents(wheel)
    assert {name.split("/")[0] for name in names} == {"draftwood", "draftwood_client", "draftwood_command.py"}
    assert names >= STUBS
    assert {"draftwood/py.typed", "draftwood_client/py.typed"} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_the_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    rebuilt = Path(next(WheelBuilder(str(sdist)).build(directory=str(tmp_path))))
    assert rebuilt.name == wheel.name
    assert contents(rebuilt) == contents(wheel)
    assert (sdist / "LICENSE").read_text() == (REPOSITORY / "LICENSE").read_text()


def test_the_server_depends_on_the_client_of_its_own_version() -> None:
    client = tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]
    server = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert server["version"] == client["version"]
    assert f"draftwood-client=={client['version']}" in server["dependencies"]


def names(requirements: Iterable[str] | None) -> set[str]:
    """The distributions of requirements, without those of extras and other systems."""
    parsed = [Requirement(one) for one in requirements or ()]
    return {one.name for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})}


def with_dependencies(wanted: set[str]) -> set[str]:
    found: set[str] = set()
    while wanted:
        found |= wanted
        wanted = set().union(*(names(distribution(one).requires) for one in wanted)) - found
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a virtual environment with the wheel, and with links to the files of its dependencies and nothing else."""
    environment = tmp_path_factory.mktemp("venv")
    venv.create(environment, symlinks=True)
    site = next(environment.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        [metadata] = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
    for name in with_dependencies(names(email.message_from_string(metadata).get_all("Requires-Dist"))):
        link(name, site)
    return environment / "bin" / "python"


def link(name: str, site: Path) -> None:
    """Links the top-level files and folders of an installed distribution into another environment."""
    found = distribution(name)
    for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        target = site / top
        if not target.exists():
            os.symlink(str(found.locate_file(top)), target)


def run(python: Path, code: str, *arguments: str) -> str:
    command = [str(python), "-I", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_it_runs_with_its_dependencies_alone(python: Path) -> None:
    run(python, "import draftwood_client.aio; from draftwood.v1 import generation_pb2_grpc, memory_pb2_grpc")
    missing = "import importlib.util as u, sys; print([name for name in sys.argv[1:] if not u.find_spec(name)])"
    absent = ["draftwood_service", "draftwood_strategies", "numpy", "torch"]
    assert run(python, missing, *absent) == f"{absent}\n"


def test_its_console_script_shows_the_clients_commands(python: Path) -> None:
    [script] = python.parent.parent.glob("lib/python*/site-packages/draftwood_client-*/entry_points.txt")
    assert script.read_text() == "[console_scripts]\ndraftwood = draftwood_command:main\n"
    shown = run(python, "from draftwood_command import main; main()", "--help")
    assert "generate" in shown
    assert "Serve a model" not in shown
