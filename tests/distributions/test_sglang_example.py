"""What the example for SGLang on Kubernetes installs."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.distributions.workspace import FOLDERS


def test_the_deployment_installs_these_versions_in_the_image_that_it_runs() -> None:
    deployment = yaml.safe_load(Path("examples/sglang/kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    [init], [server] = pod["initContainers"], pod["containers"]
    assert init["image"] == server["image"] == "lmsysorg/sglang:v0.5.23"
    for name in ("sglang", "tenants", "client", "memory", "strategies"):
        assert f" draftwood-{name}==0.1.0" in init["args"][0]
        assert 'version = "0.1.0"' in (FOLDERS[f"draftwood-{name}"] / "pyproject.toml").read_text()
    assert '"redis>=8.1,<9"' in (FOLDERS["draftwood-memory"] / "pyproject.toml").read_text()
    assert "'redis>=8.1,<9'" in init["args"][0]
    assert {"name": "PYTHONPATH", "value": "/plugins"} in server["env"]
