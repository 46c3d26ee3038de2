"""What the examples for Kubernetes install in the pods of SGLang and vLLM, and how these are started."""

from __future__ import annotations

import json
from pathlib import Path

import kubernetes_validate
import yaml

from tests.distributions.workspace import FOLDERS


def check_installed(command: str, *names: str) -> None:
    """The distributions are named, in the version that test_release_version.py checks, and redis as the memory
    requires it.
    """
    for name in names:
        assert f" draftwood-{name}==" in command
        assert f"draftwood-{name}" in FOLDERS
    assert "'redis>=8.1,<9'" in command
    assert '"redis>=8.1,<9"' in (FOLDERS["draftwood-memory"] / "pyproject.toml").read_text()


def test_sglangs_deployment_installs_these_versions_in_the_image_that_it_runs() -> None:
    deployment = yaml.safe_load(Path("examples/sglang/kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    [init], [server] = pod["initContainers"], pod["containers"]
    assert init["image"] == server["image"] == "lmsysorg/sglang:v0.5.23"
    check_installed(init["args"][0], "sglang", "tenants", "client", "memory", "strategies")
    assert {"name": "PYTHONPATH", "value": "/plugins"} in server["env"]


def test_vllms_values_say_valid_things_of_a_pod_and_switch_drafts_on() -> None:
    """As the chart's template takes them over. The chart itself is not there."""
    values = yaml.safe_load(Path("examples/vllm/values.yaml").read_text(encoding="utf-8"))
    [model] = values["servingEngineSpec"]["modelSpec"]
    first, image, arguments = model["initContainer"], f"{model['repository']}:{model['tag']}", model["vllmConfig"]
    installing = {name: first[name] for name in ("name", "image", "command", "args")}
    serving = {"name": "vllm", "image": image, "env": model["env"], "args": arguments["extraArgs"]}
    [volume], [mount] = model["extraVolumes"], model["extraVolumeMounts"]
    spec = {
        "volumes": [volume],
        "initContainers": [{**installing, "volumeMounts": first["extraVolumeMounts"]}],
        "containers": [{**serving, "volumeMounts": [mount]}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "vllm"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.31", strict=True)
    check_installed(first["args"][0], "vllm", "memory", "strategies")
    assert first["image"] == image
    assert volume["name"] == mount["name"] == first["extraVolumeMounts"][0]["name"]
    variables = {one["name"]: one.get("value") for one in model["env"]}
    assert variables["PYTHONPATH"] == mount["mountPath"] == first["extraVolumeMounts"][0]["mountPath"]
    assert f"--target {mount['mountPath']} " in first["args"][0]
    flags = dict(zip(arguments["extraArgs"][::2], arguments["extraArgs"][1::2], strict=True))
    speculation = json.loads(flags["--speculative-config"])
    assert {"method": "custom_class", "model": "draftwood_vllm.Proposer"}.items() <= speculation.items()
    assert flags["--middleware"] == "draftwood_vllm.TenantHeader"
    assert arguments["enablePrefixCaching"] is True  # this chart passes a flag for off otherwise
