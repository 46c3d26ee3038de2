"""What the chart renders, for realistic sets of values: valid, as expected, and what the server itself reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.errors import HelmError

from draftwood_service.config import read_settings
from draftwood_service.settings import Settings
from draftwood_tenants.file import read_file
from tests.helm.chart import (
    EXAMPLES,
    GOLDEN,
    OPEN,
    VALUES,
    Document,
    containers_of,
    golden,
    needs_helm_3,
    notes,
    pod_templates,
    read,
    render,
    render_3,
)

CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "GRPCRoute", "HTTPRoute", "InferencePool"}
CUSTOM |= {"LeaderWorkerSet"}
"""Kinds of operators, which the schemas of Kubernetes do not have."""
KINDS = ("Deployment", "PodDisruptionBudget", "Service", "ServiceMonitor")
DNS = {53, 5353}
"""5353 is that of OpenShift's pods; a policy sees the port of the pod, not that of the service."""
WITH_SERVER = [path for path in VALUES if path.stem != "several-models"]
by_values = pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
by_values_with_a_server = pytest.mark.parametrize("path", WITH_SERVER, ids=lambda path: path.stem)


def of_kind(documents: list[Document], kind: str, suffix: str = "") -> Document:
    found = [one for one in documents if one["kind"] == kind and one["metadata"]["name"].endswith(suffix)]
    if not suffix:
        found = [one for one in found if not one["metadata"]["name"].endswith("-gateway")]
    [document] = found
    return document


def template_of(documents: list[Document]) -> Document:
    """That of the server's pods."""
    groups = pod_templates(documents, "LeaderWorkerSet")
    return groups[0] if groups else pod_templates([of_kind(documents, "Deployment")])[0]


def pod_of(documents: list[Document]) -> Document:
    spec: Document = template_of(documents)["spec"]
    return spec


def server_of(documents: list[Document]) -> Document:
    container: Document = pod_of(documents)["containers"][0]
    assert container["name"] == "server"
    return container


@by_values
def test_the_golden_files_are_current(path: Path) -> None:
    current = golden(read(path))
    assert GOLDEN.joinpath(path.name).read_text(encoding="utf-8") == current, "python -m tests.helm.chart"


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@by_values
def test_everything_is_valid_for_kubernetes(path: Path, version: str, recwarn: pytest.WarningsRecorder) -> None:
    for document in render(read(path)):
        if document["kind"] in CUSTOM:
            with pytest.raises(kubernetes_validate.SchemaNotFoundError):
                kubernetes_validate.validate(document, version, strict=True)
        else:
            kubernetes_validate.validate(document, version, strict=True)
    assert not [*recwarn]


@pytest.mark.system
@needs_helm_3
@by_values
def test_helm_3_renders_the_same(path: Path) -> None:
    def keyed(documents: list[Document]) -> dict[tuple[str, str], Document]:
        return {(document["kind"], document["metadata"]["name"]): document for document in documents}

    def ends(documents: list[Document]) -> list[Document]:
        """How containers end, each way once."""
        pods = [template["spec"] for template in pod_templates(documents, "Deployment", "LeaderWorkerSet")]
        found = [container["lifecycle"]["preStop"] for pod in pods for container in pod["containers"]]
        return [end for at, end in enumerate(found) if end not in found[:at]]

    assert keyed(render_3(path, "1.34.0")) == keyed(render(read(path)))
    [old], [seconds] = ends(render_3(path, "1.29.0")), [end["sleep"]["seconds"] for end in ends(render(read(path)))]
    assert old == {"exec": {"command": ["sleep", str(seconds)]}}


def settings_of(documents: list[Document], folder: Path, rank: int = 0) -> Settings:
    """The settings as the server reads them in the pod, with the mounted files in `folder`.

    Args:
        rank: of the pod in its group.
    """
    server = server_of(documents)
    data = of_kind(documents, "ConfigMap", "draftwood")["data"]["draftwood.yaml"].replace("/etc/draftwood", str(folder))
    for mounted in re.findall(rf"{folder}/[^\s\"]+", data):
        Path(mounted).parent.mkdir(parents=True, exist_ok=True)
        Path(mounted).touch()
    config = folder / "draftwood.yaml"
    config.write_text(data)
    environment = {one["name"]: one.get("value", "redis://of-the-secret") for one in server["env"]}
    if "DRAFTWOOD_THREADS" in environment:
        environment["DRAFTWOOD_THREADS"] = str(server["resources"]["requests"]["cpu"])
    mounts = tuple(mount["mountPath"] for mount in server["volumeMounts"])
    for key, value in json.loads(data).items():
        if isinstance(value, str) and value.startswith(str(folder)):
            assert value.replace(str(folder), "/etc/draftwood").startswith(mounts), key
    command, _, *others = server["args"]
    assert command == "serve"
    for name, value in {"WORKER_INDEX": str(rank), "LEADER_ADDRESS": "demo-0.demo.serving"}.items():
        others = [one.replace(f"$(LWS_{name})", value) for one in others]
    return read_settings(["--config", str(config), *others], environment)


@by_values_with_a_server
def test_the_server_reads_what_the_chart_writes(path: Path, tmp_path: Path) -> None:
    documents = render(read(path))
    settings = settings_of(documents, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in server_of(documents)["ports"]}
    assert (settings.port, settings.health_port) == (ports["grpc"], ports["health"])
    assert settings.metrics_port == ports.get("metrics")
    assert settings.has_credentials or settings.auth == "open"
    tenants = [one["data"]["tenants.yaml"] for one in documents if one["metadata"]["name"].endswith("-tenants")]
    if tenants:
        assert settings.tenants_file is not None
        settings.tenants_file.write_text(tenants[0])
        found = read_file(settings.tenants_file, settings.tenant_limits)
        assert found.tenants.keys() == {"acme", "globex"}
        assert len(found.experiments) == 1


@by_values_with_a_server
def test_probes_and_graces(path: Path, tmp_path: Path) -> None:
    documents = render(read(path))
    pod, server, settings = pod_of(documents), server_of(documents), settings_of(documents, tmp_path)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["grpc"]["port"] == settings.health_port
    assert server["livenessProbe"]["grpc"]["service"] == "liveness"
    assert server["readinessProbe"]["failureThreshold"] == 1
    assert server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"] >= 300
    before = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= before + settings.drain_grace + 5


@by_values
def test_pods_are_restricted_and_hold_no_secret_in_clear(path: Path) -> None:
    documents = render(read(path))
    for pod in (template["spec"] for template in pod_templates(documents)):
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers_of(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    for document in documents:
        if document["kind"] == "ConfigMap":
            text = json.dumps(document["data"].get("draftwood.yaml", ""))
            assert not re.search(r"password|://[^/\s]*:[^/\s]*@", text)


@by_values_with_a_server
def test_everything_selects_the_pods_and_names_their_ports(path: Path) -> None:
    """Those of the server; those of the gateway are in test_gateway."""
    documents = [one for one in render(read(path)) if not one["metadata"]["name"].endswith("-gateway")]
    by_kind = {kind: [one["spec"] for one in documents if one["kind"] == kind] for kind in KINDS}
    labels = template_of(documents)["metadata"]["labels"]
    policy = of_kind(documents, "NetworkPolicy", "draftwood")["spec"]
    selectors = [one["selector"]["matchLabels"] for kind in KINDS[:2] for one in by_kind[kind]]
    selectors += [of_kind(documents, "Service", name)["spec"]["selector"] for name in ("draftwood", "-headless")]
    for selector in (*selectors, policy["podSelector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    ports = {port["name"] for container in pod_of(documents)["containers"] for port in container["ports"]}
    named = {port["targetPort"] for service in by_kind["Service"] for port in service["ports"]}
    named |= {port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())}
    assert named <= ports | {"valkey"}
    headless = of_kind(documents, "Service", "-headless")
    for monitor in by_kind["ServiceMonitor"]:
        assert monitor["selector"]["matchLabels"].items() <= headless["metadata"]["labels"].items()
        assert monitor["endpoints"][0]["port"] in {port["name"] for port in headless["spec"]["ports"]}


def allowed_ports(documents: list[Document]) -> set[int]:
    policy = of_kind(documents, "NetworkPolicy", "draftwood")
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())}
    assert ports >= DNS
    return ports - DNS


def test_the_policy_lets_out_what_the_settings_need_and_nothing_else() -> None:
    ports = {path.stem: allowed_ports(render(read(path))) for path in WITH_SERVER}
    assert ports == {
        **{path.stem: {6379, 26379, 443} for path in EXAMPLES},
        "cpu-trial": set(),
        "draft-models": {443},
        "gpu-sentinel": {6379, 26379, 4317},
        "cluster-tenants": {6379, 26379, 443},
        "embedded": {443},
        "gateway": {6379, 26379},
        "rollout": {6379},
        "routed": {6379, 26379},
        "valkey": {6379},
        "vllm": {6379, 26379},
        "vllm-nodes": {6379, 26379},
    }


@by_values_with_a_server
def test_a_container_sees_the_gpus_that_it_asks_for(path: Path) -> None:
    """Images for GPUs say NVIDIA_VISIBLE_DEVICES=all, and the device plugin replaces it where a container asks."""
    templates = pod_templates(render(read(path)), "Deployment", "LeaderWorkerSet", "Pod")
    containers = [one for template in templates for one in containers_of(template["spec"])]
    assert len(containers) >= 3
    device = read(path).get("device", {})
    for container in containers if device.get("type") == "nvidia" else ():
        asks = device.get("resourceName", "nvidia.com/gpu") in container["resources"]["limits"]
        sees_none = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
        assert asks != sees_none, container["name"]


@pytest.mark.parametrize(("tls", "protocol"), [({}, "kubernetes.io/h2c"), ({"existingSecret": "a"}, "https")])
def test_the_service_names_the_protocol_of_its_port(tls: Document, protocol: str) -> None:
    [port] = of_kind(render(OPEN | {"tls": tls}), "Service", "draftwood")["spec"]["ports"]
    assert port["appProtocol"] == protocol


def test_containers_arguments_and_volumes_can_be_added() -> None:
    more: Document = {
        "initContainers": [{"name": "warm", "image": "busybox"}],
        "extraArgs": ["--max-running=16"],
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "extra", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    }
    documents = render(OPEN | more)
    pod, server = pod_of(documents), server_of(documents)
    assert [one["name"] for one in pod["initContainers"]] == ["check", "warm"]
    assert server["args"][-1] == "--max-running=16"
    for key, where in (("extraEnv", server["env"]), ("extraVolumeMounts", server["volumeMounts"])):
        assert more[key][0] in where
    assert more["extraVolumes"][0] in pod["volumes"]
    for wrong in ("--port=1", "--tls-cert=/x", "--engine", "max-running=2"):
        with pytest.raises(HelmError, match="extraArgs"):
            render(OPEN | {"extraArgs": [wrong]})


def values(name: str) -> Document:
    return read(next(path for path in VALUES if path.stem == name))


def test_limits_of_gpus_cannot_differ_from_requests() -> None:
    limits = {"memory": "4Gi", "nvidia.com/gpu": 4}
    documents = render(OPEN | {"device": {"type": "nvidia", "count": 2}, "resources": {"limits": limits}})
    resources = server_of(documents)["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 2


def test_ports_of_urls_are_let_out() -> None:
    jwt = {"jwks": "https://login.example:8443/keys", "issuer": "i", "audience": "a"}
    external = {"url": "redis://cache.example:7000"}
    otlp, policy = {"endpoint": "http://collector:4318"}, {"egressPorts": [7777]}
    store = {"mode": "external", "external": external}
    made = render({"auth": {"jwt": jwt}, "store": store, "otlp": otlp, "networkPolicy": policy})
    assert {8443, 7000, 4318, 7777} <= allowed_ports(made)
    assert 443 not in allowed_ports(made)


def test_changed_settings_restart_the_pods_and_changed_tenants_do_not() -> None:
    def checksum(**changes: Any) -> str:
        template = of_kind(render(values("cluster-tenants") | changes), "Deployment")["spec"]["template"]
        found: str = template["metadata"]["annotations"]["checksum/config"]
        return found

    assert checksum() == checksum(tenants=[{"name": "tenants/other"}])
    assert checksum() != checksum(config={"max_running": 17})


def test_large_numbers_stay_whole() -> None:
    documents = render(OPEN | {"config": {"memory_tokens": 12_345_678, "max_waiting": 1_000_000}})
    config = yaml.safe_load(of_kind(documents, "ConfigMap", "draftwood")["data"]["draftwood.yaml"])
    assert (config["memory_tokens"], config["max_waiting"]) == (12_345_678, 1_000_000)


@by_values_with_a_server
def test_notes_name_the_next_command(path: Path) -> None:
    of_values = read(path)
    shown = [line.strip() for line in notes(of_values).splitlines() if line.startswith("  ")]
    name = of_values.get("fullnameOverride", "demo-draftwood")
    assert any(f"service/{name}" in one for one in shown)
    assert any("draftwood chat" in one for one in shown)
    assert ("--tls" in shown[-1]) == bool(of_values.get("tls"))
