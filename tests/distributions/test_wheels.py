"""What each distribution installs, and what it says of itself."""

from __future__ import annotations

import tarfile
from collections import Counter
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder

from tests.distributions.workspace import FOLDERS, MODULES, Wheel
from tools.distributions.lock import ROOT


def test_every_top_level_module_begins_with_draftwood_and_is_of_one_wheel(wheels: dict[str, Wheel]) -> None:
    found = {name: {file.partition("/")[0] for file in wheel.files} for name, wheel in wheels.items()}
    assert found == MODULES
    assert all(module.startswith("draftwood") for modules in found.values() for module in modules)
    counts = Counter(file for wheel in wheels.values() for file in wheel.files)
    assert [file for file, count in counts.items() if count > 1] == [], "installed twice"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_has_its_types_readme_and_licence(name: str, wheels: dict[str, Wheel]) -> None:
    wheel = wheels[name]
    assert not [file for file in wheel.files if "__pycache__" in file or file.endswith(".pyc")]
    assert {f"{module}/py.typed" for module in MODULES[name] if not module.endswith(".py")} <= wheel.files
    assert wheel.information("licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    metadata = wheel.metadata
    assert (metadata.license_expression, metadata.license_files) == ("Apache-2.0", ["LICENSE"])
    assert metadata.description == (FOLDERS[name] / "README.md").read_text()
    assert (metadata.description or "").startswith(f"# {name}\n")


def test_all_have_one_version_and_require_each_other_in_it(wheels: dict[str, Wheel]) -> None:
    [version] = {str(wheel.metadata.version) for wheel in wheels.values()}
    for wheel in wheels.values():
        ours = [one for one in wheel.metadata.requires_dist or [] if one.name in FOLDERS]
        assert {str(our.specifier) for our in ours} <= {f"=={version}"}


def test_entry_points_are_those_of_the_command_line(wheels: dict[str, Wheel]) -> None:
    texts = {name: wheel.information("entry_points.txt") for name, wheel in wheels.items()}
    assert texts["draftwood-client"] == "[console_scripts]\ndraftwood = draftwood_command:main\n"
    for name, commands in (
        ("draftwood", ["gateway", "key", "models", "serve"]),
        ("draftwood-benchmarks", ["bench", "demo"]),
    ):
        heading, *lines = texts[name].splitlines()
        assert (heading, sorted(line.partition(" ")[0] for line in lines)) == ("[draftwood.commands]", commands)
    assert texts["draftwood-vllm"] == "[vllm.general_plugins]\ndraftwood = draftwood_vllm.proposer:check\n"
    assert texts["draftwood-sglang"] == "[sglang.srt.plugins]\ndraftwood = draftwood_sglang.worker:register\n"
    assert sum(bool(text) for text in texts.values()) == 5


@pytest.mark.parametrize("name", FOLDERS)
def test_an_sdist_builds_the_same_wheel(name: str, wheels: dict[str, Wheel], tmp_path: Path) -> None:
    with tarfile.open(next(SdistBuilder(str(FOLDERS[name])).build(directory=str(tmp_path)))) as archive:
        archive.extractall(tmp_path, filter="data")
    source = next(path for path in tmp_path.iterdir() if path.is_dir())
    rebuilt = Wheel.build(source, tmp_path)
    assert (rebuilt.path.name, rebuilt.files) == (wheels[name].path.name, wheels[name].files)
    assert (source / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
