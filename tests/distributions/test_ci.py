"""The public workflow of every change runs what `.ci/run` does, with no more permissions than reading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOW: dict[Any, Any] = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]


def test_its_targets_are_those_of_the_local_run_and_exist() -> None:
    [stages] = re.findall(r"^for stage in ([a-z -]+); do$", (REPOSITORY / ".ci" / "run").read_text(), re.MULTILINE)
    run = stages.split()
    known = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(JOBS["make"]["strategy"]["matrix"]["target"]) == set(run)
    assert set(JOBS["nightly"]["strategy"]["matrix"]["target"]) | set(run) <= known


def test_no_job_may_write_and_no_step_writes_an_expression_into_a_script() -> None:
    assert WORKFLOW["permissions"] == {}
    for name, job in JOBS.items():
        assert job["permissions"] == {"contents": "read"}, name
        assert "timeout-minutes" in job, name
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), name
