"""Versions of vLLM that have no build for CPUs: their own files, on CPU tensors. `make test-vllm` unpacks them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.vllm import drafters
from tests.vllm.engine import PYTHON, REPOSITORY, environment_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module", params=["0.26.0", "0.33.0"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The driver's answer, with what was logged of our drafts alone."""
    environment = environment_of()
    environment["PYTHONPATH"] = f"{REPOSITORY / 'build' / 'vllm' / request.param}:{environment['PYTHONPATH']}"
    head = drafters.eagle3(tmp_path_factory.mktemp("head"))
    command = [str(PYTHON), str(Path(__file__).with_name("version_driver.py")), str(BUNDLED_MODEL), str(head)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, done.stderr[-2000:]
    log = "".join(text.partition("BESIDE")[0] for text in (done.stdout, done.stderr))
    return {**json.loads(done.stdout.splitlines()[-1]), "log": log}


def test_vllms_configuration_takes_the_second_runner(found: dict[str, Any]) -> None:
    """And schedules asynchronously, which 0.26 does for few methods. All is there: no fallback is logged."""
    assert (found["alone"]["runner"], found["alone"]["asynchronous"]) == (True, True)
    assert "drafts on the device take" in found["log"]
    for said in ("does not yet support", "first model runner", "without drafts", "will be disabled"):
        assert said not in found["log"]


def test_vllms_own_state_is_drafted_from(found: dict[str, Any]) -> None:
    """Requests come and go through vLLM's runner, and what they write through its kernels."""
    alone = found["alone"]
    assert alone["accepted"] == [[0, 0], [4, 0], [4, 0], [4, 0]]
    assert alone["of the tenant"] == [4, 0]  # another tenant's has nothing to draft from
    assert (alone["learned"], alone["off"]) == (4, False)


def test_beside_a_drafter_each_row_takes_what_is_right(found: dict[str, Any]) -> None:
    """Theirs, which is vLLM's class for EAGLE-3, never is. It stays the runner's, and is there when ours has failed."""
    beside = found["beside"]
    assert (beside["runner"], beside["theirs"]) == (True, True)
    assert beside["accepted"] == [[0, 0], [4, 0], [4, 0]]
    assert (beside["after"], beside["off"]) == ([1, 2, 3, 4], True)


def test_tokens_that_are_verified_by_probabilities_have_the_models_distribution(found: dict[str, Any]) -> None:
    """vLLM's own rejection sampler, for requests with none, one and two tokens of ours before drawn ones. The second
    tokens are those of requests whose first one was accepted."""
    expected = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    for counts in found["sampled"].values():
        for written, chances in zip(np.array(counts), expected, strict=True):
            mean = chances * written.sum()
            assert written.sum() > 50
            assert ((written - mean) ** 2 / mean).sum() < 16.3  # one in a thousand, of three degrees of freedom
