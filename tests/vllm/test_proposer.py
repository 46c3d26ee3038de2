"""The plug-in where there is no vLLM, or another than it knows: it says so once, and the host goes on."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kubernetes_validate
import numpy as np
import pytest
import yaml

from draftwood_memory import Memory
from draftwood_memory.engines.drafts import EngineDrafts
from draftwood_memory.engines.forms.chains import ChainForm
from draftwood_memory.engines.policy import SettingsPolicy
from draftwood_memory.settings.memory_settings import MemorySettings, read_environment
from draftwood_tenants.engines import opening
from draftwood_vllm import Proposer, TenantHeader, proposer
from tests.distributions.workspace import FOLDERS

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
        f" {RUNNER} has no GPUModelRunner; vLLM 0.32 has"
    ]


def test_it_is_bound_to_the_runner_and_leaves_the_class_as_it_was(runner_class: Any) -> None:
    before = dict(vars(runner_class))
    runners = [runner_class() for _ in range(2)]
    assert dict(vars(runner_class)) == before
    assert [one.drafter._runner for one in runners] == runners
    runners[0].drafter = None  # an attribute like any other
    assert runners[0].drafter is None


def test_a_runner_that_could_not_be_made_is_forgotten(runner_class: Any) -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        runner_class(fails=True)
    made = runner_class()
    assert made.drafter._runner is made
    assert not hasattr(runner_class, "drafter")


def test_a_runner_that_lacks_what_is_needed_is_named(runner_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = runner_class()
    made.input_batch = object()
    made.drafter.load_model(object())
    assert propose(made.drafter) == [[], [], []]
    assert "GPUModelRunner has no requests; vLLM 0.32 has" in caplog.text


def test_drafting_that_raises_three_times_pauses(runner_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = runner_class().drafter
    drafts = EngineDrafts(
        Memory(None, "0" * 16), MemorySettings(), SettingsPolicy(MemorySettings(), ""), 10, ChainForm(8), bool
    )
    made._opened = SimpleNamespace(drafts=drafts)
    for _ in range(4):
        assert propose(made) == [[], [], []]  # the runner has no requests
    drafts.close()
    assert drafts.failing
    assert caplog.text.count("nothing is drafted for 60 s, since 3 steps in a row failed") == 1


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


def test_what_users_name_is_there() -> None:
    assert (Proposer.__module__, TenantHeader.__name__) == ("draftwood_vllm.proposer", "TenantHeader")
    found = [one.value for one in entry_points(group="vllm.general_plugins") if one.name == "draftwood"]
    assert found in ([], ["draftwood_vllm.proposer:check"])  # installed by `make setup`


@pytest.fixture
def model_spec() -> dict[str, Any]:
    """What the values for vLLM's chart say of the model."""
    values = yaml.safe_load(Path("examples/vllm/values.yaml").read_text(encoding="utf-8"))
    [model] = values["servingEngineSpec"]["modelSpec"]
    found: dict[str, Any] = model
    return found


def test_the_values_for_kubernetes_name_these_versions(model_spec: dict[str, Any]) -> None:
    [installs] = model_spec["initContainer"]["args"]
    for name in ("draftwood-vllm", "draftwood-memory", "draftwood-strategies"):
        assert f" {name}==0.1.0" in installs
        assert 'version = "0.1.0"' in (FOLDERS[name] / "pyproject.toml").read_text()
    assert "'redis>=8.1,<9'" in installs
    assert '"redis>=8.1,<9"' in (FOLDERS["draftwood-memory"] / "pyproject.toml").read_text()


def test_what_the_values_for_kubernetes_say_of_a_pod_is_valid(model_spec: dict[str, Any]) -> None:
    """As the chart's template takes it over. The chart itself is not there."""
    first, image = model_spec["initContainer"], f"{model_spec['repository']}:{model_spec['tag']}"
    installing = {name: first[name] for name in ("name", "image", "command", "args")}
    serving = {"name": "vllm", "image": image, "env": model_spec["env"], "args": model_spec["vllmConfig"]["extraArgs"]}
    spec = {
        "volumes": model_spec["extraVolumes"],
        "initContainers": [{**installing, "volumeMounts": first["extraVolumeMounts"]}],
        "containers": [{**serving, "volumeMounts": model_spec["extraVolumeMounts"]}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "vllm"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.31", strict=True)
    assert first["image"] == image
    [volume], [mount] = spec["volumes"], model_spec["extraVolumeMounts"]
    assert volume["name"] == mount["name"] == first["extraVolumeMounts"][0]["name"]
    variables = {one["name"]: one.get("value") for one in model_spec["env"]}
    assert variables["PYTHONPATH"] == mount["mountPath"] == first["extraVolumeMounts"][0]["mountPath"]
    assert f"--target {mount['mountPath']} " in first["args"][0]


def test_the_values_for_kubernetes_switch_drafts_on_and_nothing_off(model_spec: dict[str, Any]) -> None:
    arguments = model_spec["vllmConfig"]["extraArgs"]
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    speculation = json.loads(flags["--speculative-config"])
    assert {"method": "custom_class", "model": "draftwood_vllm.Proposer"}.items() <= speculation.items()
    assert flags["--middleware"] == "draftwood_vllm.TenantHeader"
    assert model_spec["vllmConfig"]["enablePrefixCaching"] is True  # this chart passes a flag for off otherwise
