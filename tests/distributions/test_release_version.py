"""The version of a release is the same in every place that has it, and one command writes it into all of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from helm_python.chart import Chart

from tools.distributions import release_check, release_version
from tools.distributions.lock import ROOT, projects
from tools.distributions.release_version import PLACES, folders, notes, set_version, versions, wrong_for

VERSION = versions()[0][1]
RELEASED = notes()[0] != "Unreleased"
"""Whether this is a release; while the next one is made, the changelog's top entry is "Unreleased"."""
NAMED = re.compile(r"draftwood[\w-]*(?:\[[\w,-]+\])?(?:==|:)v?(\d+\.\d+\.\d+)")
"""A distribution, an image or a chart in a version."""
TEXT: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": 100}
ELSEWHERE = ("CHANGELOG.md", "docs/decisions", "docs/measurements", "tests")
"""What tells of other versions."""


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the places, of version 0.2.0 with its entry in the changelog, which the command changes."""
    for pattern in PLACES:
        for path in ROOT.glob(pattern):
            copied = tmp_path / path.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 0.2.0 (2026-11-29)\n\nIt is faster.\n\n## 0.1.0 (2026-11-01)\n"
    )
    monkeypatch.setattr(release_version, "REPOSITORY", tmp_path)
    set_version("0.2.0")
    return tmp_path


def test_every_distribution_is_released_in_one_version() -> None:
    assert {str(folder.relative_to(ROOT)) for folder in folders()} == projects().keys()
    assert {version for _, version in versions()} == {VERSION}
    assert wrong_for(VERSION) == [] or not RELEASED


def test_no_other_place_names_a_version() -> None:
    """One that the command would forget."""
    listed = subprocess.run(["git", "grep", "-lIE", r"draftwood[^ ]*(==|:)v?[0-9]+\.[0-9]+\.[0-9]+"], cwd=ROOT, **TEXT)
    names = [name for name in listed.stdout.splitlines() if not name.startswith(ELSEWHERE)]
    known = {place.rpartition(":")[0] for place, _ in versions()}
    assert "README.md" in names
    assert {name for name in names if NAMED.search((ROOT / name).read_text())} <= known


def test_the_command_changes_the_version_and_nothing_else(copy: Path) -> None:
    assert notes() == ("0.2.0 (2026-11-29)", "It is faster.")
    before = {path: path.read_text() for path in copy.rglob("*") if path.is_file()}
    set_version("1.22.333")
    after = {path: path.read_text() for path in before}
    assert {version for _, version in versions()} == {"1.22.333"}
    assert {path for path in before if before[path] == after[path]} == {copy / "CHANGELOG.md"}
    assert {path: text.replace("1.22.333", "0.2.0") for path, text in after.items()} == before


TOP_ENTRY = r'CHANGELOG.md: the top entry is "{}", not "0.2.0 \(YEAR-MONTH-DAY\)"'
FORGOTTEN = [
    # place, what stands there, what would stand there, and what is said
    ("helm/draftwood/Chart.yaml", "appVersion: 0.2.0", "appVersion: 0.1.0", "PLACE:\\d+: 0.1.0, not 0.2.0"),
    ("memory/pyproject.toml", "strategies==0.2.0", "strategies==0.1.0", "PLACE:\\d+: 0.1.0, not 0.2.0"),
    ("clients/typescript/package.json", '"version": "0.2.0"', '"version": "0.1.0"', "PLACE:\\d+: 0.1.0, not 0.2.0"),
    ("CHANGELOG.md", "0.2.0 (2026-11-29)", "Unreleased", TOP_ENTRY.format("Unreleased")),
    ("CHANGELOG.md", "0.2.0 (2026-11-29)", "0.2.0", TOP_ENTRY.format("0.2.0")),
]


@pytest.mark.parametrize(("place", "old", "new", "expected"), FORGOTTEN)
def test_a_release_that_forgot_a_part_is_refused_with_the_place(
    copy: Path, place: str, old: str, new: str, expected: str
) -> None:
    assert wrong_for("0.2.0") == []
    (copy / place).write_text((copy / place).read_text().replace(old, new))
    [wrong] = wrong_for("0.2.0")
    assert re.fullmatch(expected.replace("PLACE", place), wrong)


def test_a_place_without_a_version_is_an_error(copy: Path) -> None:
    (copy / "docs/telemetry.md").write_text("no output\n")
    with pytest.raises(ValueError, match=r"docs/telemetry.md: no version"):
        versions()
    (copy / "README.md").unlink()
    with pytest.raises(FileNotFoundError):
        versions()


def test_a_tag_of_another_version_is_refused() -> None:
    """As the release's workflow calls it."""
    command = [sys.executable, "tools/distributions/release_version.py", "9.9.9"]
    done = subprocess.run(command, cwd=ROOT, **TEXT)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert len(lines) == len(versions()) + 1
    assert any(line.startswith("helm/draftwood/Chart.yaml:") for line in lines)


def test_a_release_has_wheels_archives_chart_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one distribution here; test_wheels.py builds all."""
    monkeypatch.setattr(release_check, "folders", lambda: [ROOT / "tenants"])
    release_check.make(tmp_path)
    part, chart = f"draftwood_tenants-{VERSION}", f"draftwood-{VERSION}.tgz"
    made = {f"{part}.tar.gz", f"{part}-py3-none-any.whl", chart, "notes.md"}
    assert {path.name for path in tmp_path.iterdir()} == made
    packaged = Chart.load_archive((tmp_path / chart).read_bytes())
    assert (packaged.version, packaged.metadata["appVersion"]) == (VERSION, VERSION)
    assert (tmp_path / "notes.md").read_text().strip() == notes()[1]


@pytest.mark.skipif(not RELEASED, reason="the protocol may have grown since the last release")
def test_the_protocol_of_a_release_is_the_one_that_must_not_break(tmp_path: Path) -> None:
    """Else run `make baseline`."""
    built = tmp_path / "protocol.binpb"
    buf = Path(sys.executable).with_name("buf")
    subprocess.run([buf, "build", "--output", built], cwd=ROOT, check=True, timeout=60)
    today, baseline = (
        FileDescriptorSet.FromString(path.read_bytes()) for path in (built, ROOT / "protos/baseline.binpb")
    )
    assert [file.name for file in baseline.file] == [file.name for file in today.file]
    for before, after in zip(baseline.file, today.file, strict=True):
        before.ClearField("source_code_info")
        after.ClearField("source_code_info")
        assert before == after, after.name
