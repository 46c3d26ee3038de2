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
from tools.distributions.release_version import notes, versions

REPOSITORY = Path(__file__).resolve().parents[2]
CI, RELEASE = (yaml.safe_load((REPOSITORY / f".github/workflows/{name}.yml").read_text()) for name in ("ci", "release"))
JOBS: dict[str, Any] = RELEASE["jobs"]
VERSION = versions()[0][1]


def test_its_targets_are_those_of_the_local_run_and_exist() -> None:
    [stages] = re.findall(r"^for stage in ([a-z -]+); do$", (REPOSITORY / ".ci" / "run").read_text(), re.MULTILINE)
    run = stages.split()
    known = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(CI["jobs"]["make"]["strategy"]["matrix"]["target"]) == set(run)
    assert set(CI["jobs"]["nightly"]["strategy"]["matrix"]["target"]) | set(run) <= known


@pytest.mark.parametrize("workflow", [CI, RELEASE], ids=["ci", "release"])
def test_no_job_may_do_more_than_it_must_and_no_step_writes_an_expression_into_a_script(workflow: Any) -> None:
    """A tag's name would be run as a command."""
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, name
        if workflow is CI:
            assert job["permissions"] == {"contents": "read"}, name
        assert job["permissions"].get("contents", "read") == "read" or name == "notes", name
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), name
            assert "@v" in step.get("uses", "@v"), name


def test_nothing_is_published_before_the_versions_are_compared() -> None:
    steps = JOBS["distributions"]["steps"]
    [compared] = [step["run"] for step in steps if "release_version" in step.get("run", "") and "--" not in step["run"]]
    assert compared == 'python tools/distributions/release_version.py "${GITHUB_REF_NAME#v}"'
    for name in JOBS:
        assert "distributions" in needed(name), name
    assert JOBS["pypi"]["permissions"] == {"id-token": "write"}, "packages are published without a password"
    assert JOBS["pypi"]["environment"] == "pypi"
    assert RELEASE["defaults"]["run"]["shell"] == "bash", "a step fails with each of its commands"


def needed(job: str) -> set[str]:
    """The job, and those that end before it."""
    before = JOBS[job].get("needs", [])
    return {job}.union(*map(needed, [before] if isinstance(before, str) else before))


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
"""A stand-in for docker, helm, cosign and gh."""


def run_last_step(job: str, folder: Path, **environment: str) -> list[str]:
    """The commands that the last step of a job runs in a folder, for the tag of this version in Some/Where."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("docker", "helm", "cosign", "gh"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    (programs / "python3").symlink_to(sys.executable)
    of_github = {
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_REPOSITORY": "Some/Where",
        "GITHUB_REPOSITORY_OWNER": "Some",
        "GITHUB_REF_NAME": f"v{VERSION}",
        "IMAGE": "ghcr.io/Some/Where",
    }
    calls = folder / "calls"
    subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", JOBS[job]["steps"][-1]["run"]],
        cwd=folder / JOBS[job]["steps"][-1].get("working-directory", "."),
        env={"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(calls), **of_github, **environment},
        check=True,
        timeout=100,
    )
    return calls.read_text().splitlines()


def test_both_architectures_have_one_tag_which_is_signed(tmp_path: Path) -> None:
    digests = tmp_path / "digests"
    digests.mkdir()
    for digest in ("one", "two"):
        (digests / digest).touch()
    create, _, sign = run_last_step("tag", tmp_path, SUFFIX="-cuda")
    image = "ghcr.io/some/where"
    assert create.endswith(f"create --tag {image}:{VERSION}-cuda {image}@sha256:one {image}@sha256:two")
    assert sign == f"cosign sign --yes --recursive {image}@sha256:tagged"
    assert JOBS["tag"]["permissions"]["id-token"] == "write"


def test_the_chart_that_is_pushed_and_signed_asks_for_the_images_that_were_tagged(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "helm" / "draftwood")
    package, push, sign = run_last_step("chart", tmp_path)
    assert package == f"helm package helm/draftwood --version {VERSION} --app-version {VERSION}"
    assert push == f"helm push draftwood-{VERSION}.tgz oci://ghcr.io/some/charts"
    assert sign == "cosign sign --yes ghcr.io/some/charts/draftwood@sha256:pushed"
    assert JOBS["chart"]["permissions"]["id-token"] == "write"
    packaged = Chart.load(tmp_path / "helm" / "draftwood")
    gpu = {"device": {"type": "nvidia"}}
    releases: dict[str, dict[str, Any]] = {"": {}, "-cuda": gpu, "-vllm": {**gpu, "engine": "vllm"}}
    for suffix, values in releases.items():
        manifests = packaged.render({**OPEN, "gateway": {"mode": "sidecar"}, **values}, name="demo", namespace="any")
        named = {*re.findall(r"image: (\S*some\S*)", "".join(manifests.values()))}
        assert named == {f"ghcr.io/some/where:{VERSION}{suffix}"}


def test_the_notes_are_the_changelogs_top_entry_and_their_links_lead_to_the_tag(tmp_path: Path) -> None:
    script = "tools/distributions/release_version.py"
    (tmp_path / script).parent.mkdir(parents=True)
    for name in (script, "CHANGELOG.md"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    [create] = run_last_step("notes", tmp_path)
    assert create == f"gh release create v{VERSION} --verify-tag --title {VERSION} --notes-file notes.md"
    written = (tmp_path / "notes.md").read_text()
    assert written.replace(f"https://github.com/Some/Where/blob/v{VERSION}/", "") == f"{notes()[1]}\n"
    assert not re.search(r"\]\((?!https://)", written)
    assert {name for name, job in JOBS.items() if "write" in job["permissions"].get("contents", "")} == {"notes"}
