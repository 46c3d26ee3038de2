"""Versions of vLLM that have no build for CPUs: their own files, on CPU tensors. `make test-vllm` unpacks them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_vllm.second_runner import missing
from tests.vllm.engine import PYTHON, REPOSITORY, environment_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
VERSIONS = ("0.26.0", "0.33.0")


def files_of(version: str) -> Path:
    return REPOSITORY / "build" / "vllm" / version


@pytest.mark.parametrize("version", VERSIONS)
def test_all_that_is_needed_is_there(version: str) -> None:
    assert missing(files_of(version)) == ""


@pytest.fixture(scope="module", params=VERSIONS)
def answer(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of `version_driver`, with what was logged."""
    environment = environment_of()
    environment["PYTHONPATH"] = f"{files_of(request.param)}:{environment['PYTHONPATH']}"
    command = [str(PYTHON), str(Path(__file__).with_name("version_driver.py")), str(BUNDLED_MODEL)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stdout + done.stderr}


def test_vllms_configuration_takes_the_second_runner(answer: dict[str, Any]) -> None:
    """And schedules asynchronously, which 0.26 does for few methods. No fallback is logged."""
    assert (answer["runner"], answer["asynchronous"]) == (True, True)
    assert "drafts on the device take" in answer["log"]
    for said in ("does not yet support", "first model runner", "without drafts", "will be disabled"):
        assert said not in answer["log"]


def test_vllms_own_state_is_drafted_from(answer: dict[str, Any]) -> None:
    """Requests come and go through vLLM's runner, and what they write through its kernels."""
    assert answer["accepted"] == [[0, 0], [4, 0], [4, 0], [4, 0]]
    assert answer["of the tenant"] == [4, 0]  # another tenant's has nothing to draft from
    assert (answer["learned"], answer["off"]) == (4, False)
