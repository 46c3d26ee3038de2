"""The plug-in where there is no vLLM, or another than it knows: it says so once, and the host goes on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftwood_memory.settings import read_environment
from draftwood_tenants import engines as opening
from draftwood_vllm import Proposer, proposer

RUNNER = "vllm.v1.worker.gpu_model_runner"
CONFIG = SimpleNamespace(
    speculative_config=SimpleNamespace(num_speculative_tokens=8), model_config=SimpleNamespace(max_model_len=64)
)
SAMPLED = [[5], [], [6, 7]]


@pytest.fixture
def runner_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """In the place of vLLM's model runner, which makes its proposer in the same way."""

    class GPUModelRunner:
        def __init__(self, fails: bool = False) -> None:
            made = Proposer(CONFIG)
            if fails:
                raise RuntimeError("no memory")
            self.drafter: Any = made

    module: Any = ModuleType(RUNNER)
    module.GPUModelRunner = GPUModelRunner
    monkeypatch.setitem(sys.modules, RUNNER, module)
    return GPUModelRunner


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """vLLM's handlers are shared with ours once; a test leaves none."""
    yield
    for name in ("draftwood", "draftwood_memory", "draftwood_strategies"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def propose(made: Proposer) -> list[list[int]]:
    return made.propose(SAMPLED, np.array([3, 3, 4], np.int32), np.zeros((3, 64), np.int32), slot_mappings=None)


def test_without_vllms_runner_nothing_is_drafted(caplog: pytest.LogCaptureFixture) -> None:
    made = Proposer(CONFIG)
    made.load_model(object())
    assert propose(made) == [[], [], []]
    assert [record.getMessage() for record in caplog.records] == [
        "vLLM of an unknown version goes on without drafts of Draftwood: it cannot be bound to the model runner:"
        f" {RUNNER} has no GPUModelRunner"
    ]


def test_it_is_bound_to_the_runner_that_is_made_and_leaves_the_class_as_it_was(runner_class: Any) -> None:
    before = dict(vars(runner_class))
    with pytest.raises(RuntimeError, match="no memory"):
        runner_class(fails=True)  # it is forgotten
    runners = [runner_class() for _ in range(2)]
    assert dict(vars(runner_class)) == before
    assert [runner.drafter._runner for runner in runners] == runners
    runners[0].drafter = None  # an attribute like any other
    assert runners[0].drafter is None


def test_a_runner_that_lacks_what_is_needed_is_named(runner_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = runner_class()
    made.input_batch = object()
    made.drafter.load_model(object())
    assert propose(made.drafter) == [[], [], []]
    assert "GPUModelRunner has no requests; vLLM 0.32 has" in caplog.text


def test_the_check_in_each_process_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    proposer.check()
    assert "vLLM" in caplog.text or "draftwood-vllm" in caplog.text


@pytest.mark.parametrize(
    ("environ", "tenant"),
    [
        ({}, "default"),
        ({"DRAFTWOOD_TENANT": "acme"}, "acme"),
        ({"DRAFTWOOD_STORE": "redis://cache"}, ""),
        ({"DRAFTWOOD_STORE": "redis://cache", "DRAFTWOOD_TENANT": "acme"}, "acme"),
    ],
)
def test_the_tenant_of_requests_that_name_none(environ: dict[str, str], tenant: str) -> None:
    assert opening.tenant_of(environ, read_environment(environ)) == tenant


def test_a_model_without_a_checkpoint_is_known_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    names = [opening.fingerprint("vLLM", None, name, {"a": 1}) for name in ("one", "two", "one")]
    assert names[0] == names[2] != names[1]
    assert "shares its memories with no other engine" in caplog.text


def test_the_log_shows_no_password() -> None:
    settings = read_environment({"DRAFTWOOD_STORE": "redis://user:secret@cache"})
    assert "secret" not in opening.described(settings, "")
