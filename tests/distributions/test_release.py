"""The release: one version of everything, and a workflow that publishes all of it with few permissions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.distributions.lock import projects
from tools.distributions.release_version import folders, versions

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOW: dict[Any, Any] = yaml.safe_load((REPOSITORY / ".github/workflows/release.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]


def test_all_distributions_are_released_with_one_version() -> None:
    assert {str(folder.relative_to(REPOSITORY)) for folder in folders()} == projects().keys()
    assert len({*versions().values()}) == 1


@pytest.mark.parametrize(("version", "status"), [("right", 0), ("9.9.9", 1)])
def test_a_tag_of_another_version_is_refused_by_place(version: str, status: int) -> None:
    [current] = {*versions().values()}
    command = [sys.executable, "tools/distributions/release_version.py", current if version == "right" else version]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == status
    assert ("helm/draftwood/Chart.yaml appVersion" in done.stdout) == bool(status)


def test_permissions_are_given_by_job_and_no_more_than_needed() -> None:
    assert WORKFLOW["permissions"] == {}
    assert JOBS["pypi"]["permissions"] == {"id-token": "write"}
    assert JOBS["pypi"]["environment"] == "pypi"
    for name, job in JOBS.items():
        assert "permissions" in job, name
        assert job["permissions"].get("contents", "read") == "read", name
        assert "timeout-minutes" in job, name


def test_no_step_writes_an_expression_into_a_script() -> None:
    """A tag's name would be run as a command."""
    for name, job in JOBS.items():
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), name
            if "uses" in step:
                assert "@v" in step["uses"], step["uses"]


def test_images_of_every_variant_have_both_architectures_an_sbom_and_provenance() -> None:
    images = JOBS["image"]["strategy"]["matrix"]["include"]
    tagged = {one["variant"]: one["suffix"] for one in JOBS["tag"]["strategy"]["matrix"]["include"]}
    assert {(one["variant"], one["architecture"]) for one in images} == {
        (variant, architecture) for variant in tagged for architecture in ("amd64", "arm64")
    }
    # As the chart asks for them.
    assert tagged == {"cpu": "", "cuda": "-cuda", "vllm": "-vllm"}
    [build] = [step["with"] for step in JOBS["image"]["steps"] if "build-push" in step.get("uses", "")]
    assert (build["sbom"], build["provenance"]) == (True, "mode=max")
    assert all((REPOSITORY / one["file"]).is_file() for one in images)


def test_what_is_pushed_is_signed() -> None:
    for name in ("tag", "chart"):
        assert "cosign sign --yes" in JOBS[name]["steps"][-1]["run"]
        assert JOBS[name]["permissions"]["id-token"] == "write"
