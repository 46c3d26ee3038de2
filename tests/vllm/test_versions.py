"""Versions of vLLM that have no build for CPUs: their own files, on CPU tensors. `make test-vllm` unpacks them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_vllm.second_runner import missing
from tests.vllm import drafters
from tests.vllm.engine import PYTHON, REPOSITORY, environment_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
VERSIONS = ("0.26.0", "0.33.0")


def files_of(version: str) -> Path:
    return REPOSITORY / "build" / "vllm" / version


@pytest.mark.parametrize("version", VERSIONS)
def test_all_that_is_needed_is_there(version: str) -> None:
    assert missing(files_of(version)) == ""


def answer_of(version: str, driver: str, *arguments: object) -> dict[str, Any]:
    """Of a driver, with what was logged."""
    environment = environment_of()
    environment["PYTHONPATH"] = f"{files_of(version)}:{environment['PYTHONPATH']}"
    command = [str(PYTHON), str(Path(__file__).with_name(driver)), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stdout + done.stderr}


@pytest.fixture(scope="module", params=VERSIONS)
def answer(request: pytest.FixtureRequest) -> dict[str, Any]:
    return answer_of(request.param, "version_driver.py", BUNDLED_MODEL)


@pytest.fixture(scope="module", params=VERSIONS)
def beside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    head = drafters.eagle3(tmp_path_factory.mktemp("head"))
    return answer_of(request.param, "beside_version_driver.py", BUNDLED_MODEL, head)


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


def test_beside_a_drafter_each_row_takes_what_is_right(beside: dict[str, Any]) -> None:
    """Theirs, which is vLLM's class for EAGLE-3, never is. It stays the runner's, and is there when ours has failed."""
    assert (beside["runner"], beside["theirs"]) == (True, True)
    assert beside["accepted"] == [[0, 0], [4, 0], [4, 0]]
    assert (beside["after"], beside["off"]) == ([1, 2, 3, 4], True)


def test_tokens_that_are_verified_by_probabilities_have_the_models_distribution(beside: dict[str, Any]) -> None:
    """vLLM's own rejection sampler, for requests with none, one and two tokens of ours before drawn ones. The second
    tokens are those of requests whose first one was accepted."""
    expected = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    for counts in beside["sampled"].values():
        for found, chances in zip(np.array(counts), expected, strict=True):
            mean = chances * found.sum()
            assert found.sum() > 50
            assert ((found - mean) ** 2 / mean).sum() < 16.3  # one in a thousand, of three degrees of freedom
