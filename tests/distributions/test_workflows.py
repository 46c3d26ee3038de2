"""Workflows: the one of every change runs what `.ci/run` does; that of a release publishes one version of everything.

Both have few permissions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart

from tests.helm.chart import CHART, OPEN
from tools.distributions.lock import projects
from tools.distributions.release_version import folders, versions

REPOSITORY = Path(__file__).resolve().parents[2]
CI, RELEASE = (yaml.safe_load((REPOSITORY / f".github/workflows/{name}.yml").read_text()) for name in ("ci", "release"))
JOBS: dict[str, Any] = RELEASE["jobs"]


def test_its_targets_are_those_of_the_local_run_and_exist() -> None:
    [stages] = re.findall(r"^for stage in ([a-z -]+); do$", (REPOSITORY / ".ci" / "run").read_text(), re.MULTILINE)
    run = stages.split()
    known = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(CI["jobs"]["make"]["strategy"]["matrix"]["target"]) == set(run)
    assert set(CI["jobs"]["nightly"]["strategy"]["matrix"]["target"]) | set(run) <= known


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


@pytest.mark.parametrize("workflow", [CI, RELEASE], ids=["ci", "release"])
def test_no_job_may_do_more_than_it_must_and_no_step_writes_an_expression_into_a_script(workflow: Any) -> None:
    """A tag's name would be run as a command."""
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, name
        if workflow is CI:
            assert job["permissions"] == {"contents": "read"}, name
        assert job["permissions"].get("contents", "read") == "read", name
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), name
            assert "@v" in step.get("uses", "@v"), name


def test_packages_are_published_without_a_password() -> None:
    assert JOBS["pypi"]["permissions"] == {"id-token": "write"}
    assert JOBS["pypi"]["environment"] == "pypi"


def test_images_of_every_variant_have_both_architectures_an_sbom_and_provenance() -> None:
    images = JOBS["image"]["strategy"]["matrix"]["include"]
    tagged = {job["variant"]: job["suffix"] for job in JOBS["tag"]["strategy"]["matrix"]["include"]}
    assert {(image["variant"], image["architecture"]) for image in images} == {
        (variant, architecture) for variant in tagged for architecture in ("amd64", "arm64")
    }
    # As the chart asks for them.
    assert tagged == {"cpu": "", "cuda": "-cuda", "vllm": "-vllm"}
    [build] = [step["with"] for step in JOBS["image"]["steps"] if "build-push" in step.get("uses", "")]
    assert (build["sbom"], build["provenance"]) == (True, "mode=max")
    assert all((REPOSITORY / image["file"]).is_file() for image in images)


PROGRAM = """#!/bin/sh
echo "$(basename $0) $*" >>"$CALLS"
case "$*" in
    push*) echo "Digest: sha256:pushed" >&2 ;;
    *inspect*) echo sha256:tagged ;;
esac
"""
"""A stand-in for docker, helm and cosign."""


def run_last_step(job: str, folder: Path, **environment: str) -> list[str]:
    """The commands that the last step of a job of the tag v0.1.0 of Some/Where runs in a folder."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("docker", "helm", "cosign"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    of_github = {"GITHUB_REPOSITORY_OWNER": "Some", "GITHUB_REF_NAME": "v0.1.0", "IMAGE": "ghcr.io/Some/Where"}
    calls = folder / "calls"
    subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", JOBS[job]["steps"][-1]["run"]],
        cwd=folder / JOBS[job]["steps"][-1].get("working-directory", "."),
        env={"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(calls), **of_github, **environment},
        check=True,
        timeout=30,
    )
    return calls.read_text().splitlines()


def test_both_architectures_have_one_tag_which_is_signed(tmp_path: Path) -> None:
    digests = tmp_path / "digests"
    digests.mkdir()
    for digest in ("one", "two"):
        (digests / digest).touch()
    create, _, sign = run_last_step("tag", tmp_path, SUFFIX="-cuda")
    image = "ghcr.io/some/where"
    assert create.endswith(f"create --tag {image}:0.1.0-cuda {image}@sha256:one {image}@sha256:two")
    assert sign == f"cosign sign --yes --recursive {image}@sha256:tagged"
    assert JOBS["tag"]["permissions"]["id-token"] == "write"


def test_the_chart_that_is_pushed_and_signed_asks_for_the_images_that_were_tagged(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "helm" / "draftwood")
    package, push, sign = run_last_step("chart", tmp_path)
    assert package == "helm package helm/draftwood --version 0.1.0 --app-version 0.1.0"
    assert push == "helm push draftwood-0.1.0.tgz oci://ghcr.io/some/charts"
    assert sign == "cosign sign --yes ghcr.io/some/charts/draftwood@sha256:pushed"
    assert JOBS["chart"]["permissions"]["id-token"] == "write"
    packaged = Chart.load(tmp_path / "helm" / "draftwood")
    gpu = {"device": {"type": "nvidia"}}
    releases: dict[str, dict[str, Any]] = {"": {}, "-cuda": gpu, "-vllm": {**gpu, "engine": "vllm"}}
    for suffix, values in releases.items():
        manifests = packaged.render({**OPEN, "gateway": {"mode": "sidecar"}, **values}, name="demo", namespace="any")
        named = {*re.findall(r"image: (\S*some\S*)", "".join(manifests.values()))}
        assert named == {f"ghcr.io/some/where:0.1.0{suffix}"}


def test_a_step_fails_with_each_of_its_commands() -> None:
    assert RELEASE["defaults"]["run"]["shell"] == "bash"
