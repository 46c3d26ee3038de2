"""The gateway as pods of its own or beside each server, and what endpoint pickers are told of the pods."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from helm_python.errors import HelmError

from draftwood_service.gateway.command import gateway
from draftwood_service.telemetry.metrics import ALIASES
from tests.helm.chart import OPEN, Document, notes, render
from tests.helm.test_renders import DNS, of_kind, pod_of, server_of, values

SCHEMAS = Path(__file__).parent / "schemas"
SPECS = {"HTTPRoute": "httproute", "InferencePool": "inferencepool"}


def strict_schema(name: str) -> Any:
    return strict(json.loads((SCHEMAS / f"{name}-v1-spec.json").read_text()))


def strict(schema: Any) -> Any:
    """With names that it does not know refused, as an API server reports them."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made


def pod_with_gateway(documents: list[Document]) -> tuple[Document, Document]:
    """The pod, and its container of the gateway."""
    pods = [document["spec"]["template"]["spec"] for document in documents if document["kind"] == "Deployment"]
    [found] = [(pod, each) for pod in pods for each in pod["containers"] if each["name"] == "gateway"]
    return found


def gateway_of(documents: list[Document]) -> Document:
    return pod_with_gateway(documents)[1]


@pytest.mark.parametrize(("name", "schemas"), [("routed", SPECS), ("gateway", {"HTTPRoute": SPECS["HTTPRoute"]})])
def test_routes_and_pools_are_valid(name: str, schemas: dict[str, str]) -> None:
    documents = {one["kind"]: one for one in render(values(name)) if one["kind"] in SPECS}
    assert documents.keys() == schemas.keys()
    for kind, document in documents.items():
        jsonschema.validate(document["spec"], strict_schema(schemas[kind]))


def test_a_pool_selects_pods_whose_gateways_answer_at_its_port() -> None:
    documents = render(values("routed"))
    pool = of_kind(documents, "InferencePool")["spec"]
    labels = of_kind(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert [port["number"] for port in pool["targetPorts"]] == [gateway_of(documents)["ports"][0]["containerPort"]]
    backend = of_kind(documents, "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]
    assert backend["kind"] == "InferencePool"
    assert backend["name"] == of_kind(documents, "InferencePool")["metadata"]["name"]
    # The picker reads metrics of pods in its namespace.
    policy = of_kind(documents, "NetworkPolicy", "draftwood")["spec"]["ingress"]
    assert {"podSelector": {}} in next(rule["from"] for rule in policy if rule["ports"][0]["port"] == "metrics")


def test_the_pickers_configuration_names_metrics_as_they_are_exposed() -> None:
    data = of_kind(render(values("routed")), "ConfigMap", "-picker")["data"]["endpoint-picker.yaml"]
    config = yaml.safe_load(data)
    [extractor] = [one for one in config["plugins"] if one["type"] == "core-metrics-extractor"]
    [engine] = extractor["parameters"]["engineConfigs"]
    expected = {alias: metric.name.replace(".", "_") for alias, metric in ALIASES.items()}
    assert engine["queuedRequestsSpec"] == expected["vllm:num_requests_waiting"]
    assert engine["runningRequestsSpec"] == expected["vllm:num_requests_running"]
    assert engine["kvUsageSpec"] == expected["vllm:kv_cache_usage_perc"]
    used = {one["pluginRef"] for profile in config["schedulingProfiles"] for one in profile["plugins"]}
    assert used <= {one["type"] for one in config["plugins"]}
    labels = of_kind(render(values("routed")), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels[extractor["parameters"]["engineLabelKey"]] == engine["name"] == "draftwood"


def labels_of(**routing: Any) -> dict[str, str]:
    changes = {"routing": routing, "gateway": {"mode": "sidecar"}, "model": {"name": "Qwen/Qwen3-8B", "offline": False}}
    found: dict[str, str] = of_kind(render(OPEN | changes), "Deployment")["spec"]["template"]["metadata"]["labels"]
    return found


def test_labels_of_pods() -> None:
    assert not [name for name in labels_of() if "llm-d" in name or "aibrix" in name]
    llm_d = {"llm-d.ai/engine-type": "draftwood", "llm-d.ai/model": "Qwen3-8B"}
    assert llm_d.items() <= labels_of(labels="llm-d").items()
    # Under vLLM's names a picker without the file reads the pods as vLLM's.
    assert labels_of(labels="llm-d", vllmNames=True)["llm-d.ai/engine-type"] == "vllm"
    assert {
        "model.aibrix.ai/engine": "vllm",
        "model.aibrix.ai/name": "Qwen3-8B",
        "model.aibrix.ai/port": "8080",
        "model.aibrix.ai/metric-port": "9464",
    }.items() <= labels_of(labels="aibrix", vllmNames=True).items()
    settings = of_kind(render(OPEN | {"routing": {"vllmNames": True}}), "ConfigMap", "draftwood")["data"]
    assert json.loads(settings["draftwood.yaml"])["metrics_vllm_names"] is True


@pytest.mark.parametrize("name", ["routed", "gateway", "several-models"])
def test_the_command_knows_the_arguments_and_the_pod_mounts_the_files_that_they_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pod, container = pod_with_gateway(render(values(name)))
    command, *arguments = container["args"]
    assert command == "gateway"
    assert gateway([*arguments, "--help"]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert [argument for argument in arguments if argument.partition("=")[0] not in shown] == []
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {*mounts.values()} <= {volume["name"] for volume in pod["volumes"]}
    for argument in arguments:
        if "=/" in argument and not argument.startswith("--target"):
            assert argument.partition("=")[2].rpartition("/")[0] in mounts
    assert len({volume["name"] for volume in pod["volumes"]}) == len(pod["volumes"])


def test_a_deployment_has_its_service_and_everything_that_selects_it() -> None:
    documents = render(values("gateway"))

    def spec_of(kind: str, suffix: str = "-gateway") -> Any:
        return of_kind(documents, kind, suffix)["spec"]

    deployment, service = spec_of("Deployment"), spec_of("Service")
    labels = deployment["template"]["metadata"]["labels"]
    policy, monitor = spec_of("NetworkPolicy"), spec_of("ServiceMonitor")
    for selector in (
        *(spec_of(kind)["selector"]["matchLabels"] for kind in ("PodDisruptionBudget", "Deployment")),
        service["selector"],
        policy["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {*DNS, 50051}
    # Neither is a server: a client that calls a service of servers never reaches a gateway.
    for name in ("draftwood", "-headless"):
        assert not spec_of("Service", name)["selector"].items() <= labels.items()
    target = spec_of("HorizontalPodAutoscaler")["scaleTargetRef"]["name"]
    assert target == of_kind(documents, "Deployment", "-gateway")["metadata"]["name"]
    assert "replicas" not in deployment
    assert deployment["template"]["spec"]["terminationGracePeriodSeconds"] >= 5 + 120 + 5
    # The server lets it in, though callers are named.
    rules = spec_of("NetworkPolicy", "draftwood")["ingress"][0]["from"]
    assert any(rule.get("podSelector", {}).get("matchLabels", {}).items() <= labels.items() for rule in rules[1:])
    of_service = of_kind(documents, "Service", "-gateway")["metadata"]["labels"].items()
    assert monitor["selector"]["matchLabels"].items() <= of_service
    assert monitor["endpoints"][0]["port"] == service["ports"][0]["name"]
    # And the server's monitor does not collect gateways.
    assert not spec_of("ServiceMonitor", "")["selector"]["matchLabels"].items() <= of_service


def test_a_gateway_of_several_models_is_a_release_without_a_server() -> None:
    documents = render({"gateway": STANDALONE})  # who may call is the servers' business
    assert [(one["kind"], one["metadata"]["name"].removeprefix("demo-draftwood")) for one in documents] == [
        ("ServiceAccount", ""),
        ("Service", "-gateway"),
        ("Deployment", "-gateway"),
        ("PodDisruptionBudget", "-gateway"),
        ("NetworkPolicy", "-gateway"),
    ]
    container = gateway_of(documents)
    servers = ["--server=a=dns:///a-headless:50051", "--server=org/b=b.other:7000"]
    assert [one for one in container["args"] if one.startswith(("--server=", "--target", "--tls"))] == servers
    assert "--plaintext-credentials" in container["args"]
    policy = of_kind(documents, "NetworkPolicy", "-gateway")["spec"]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {*DNS, 50051, 7000}
    shown = notes({"gateway": STANDALONE})
    assert "/v1, with these models:" in shown
    assert "org/b of b.other:7000" in shown
    own = {**STANDALONE, "server": {"tlsSecret": "of-servers", "name": "servers.example"}}
    documents = render({"gateway": own, "tls": {"clientCA": True}})
    pod, container = pod_with_gateway(documents)
    of_tls = [one.partition("=")[0] for one in container["args"] if one.startswith("--tls")]
    assert of_tls == ["--tls-ca", "--tls-server-name", "--tls-cert", "--tls-key"]
    assert "--plaintext-credentials" not in container["args"]
    assert [one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one] == ["of-servers"]


def test_a_gateway_sends_credentials_in_clear_only_to_servers_without_tls() -> None:
    arguments = gateway_of(render(values("gateway")))["args"]
    assert "--tls-server-name=draftwood.example" in arguments
    assert not {"--plaintext-credentials", "--share-credential"} & {*arguments}
    assert "--plaintext-credentials" in gateway_of(render(OPEN | {"gateway": DEPLOYMENT}))["args"]
    # Its own key is for requests that bring none, since the values say so.
    container = gateway_of(render(values("routed")))
    assert "--share-credential" in container["args"]
    assert "DRAFTWOOD_API_KEY" in {each["name"] for each in container["env"]}


@pytest.mark.parametrize("name", ["routed", "gateway"])
def test_containers_are_checked_first_with_what_they_are_given(name: str) -> None:
    documents = render(values(name))
    for pod, container in (pod_with_gateway(documents), (pod_of(documents), server_of(documents))):
        command, *arguments = container["args"]
        [check] = [one for one in pod["initContainers"] if one["args"][:2] == [command, "--check"]]
        assert check["args"][2:] == arguments
        for part in ("image", "env", "resources", "securityContext", "volumeMounts"):
            assert check[part] == container[part]
    assert pod["initContainers"][0]["name"] == "check"


def test_a_deployments_pods_have_nodes_of_their_own() -> None:
    tolerations = [{"key": "a", "operator": "Exists"}]
    own = DEPLOYMENT | {"nodeSelector": {"pool": "cpu"}, "tolerations": tolerations}
    documents = render(OPEN | {"gateway": own, "nodeSelector": {"pool": "gpu"}})
    pod = pod_with_gateway(documents)[0]
    assert (pod["nodeSelector"], pod["tolerations"]) == (own["nodeSelector"], tolerations)
    assert pod_of(documents)["nodeSelector"] == {"pool": "gpu"}


def test_keda_shows_its_token_to_prometheus() -> None:
    authentication = {"name": "thanos", "modes": "bearer", "namespaced": True}
    scaling = {"type": "keda", "minReplicas": 0, "prometheusAuthentication": authentication}
    scaler = of_kind(render(OPEN | {"autoscaling": scaling, "gateway": DEPLOYMENT}), "ScaledObject")["spec"]
    assert len(scaler["triggers"]) == 3
    for trigger in scaler["triggers"]:
        assert trigger["authenticationRef"] == {"name": "thanos"}
        assert (trigger["metadata"]["authModes"], trigger["metadata"]["namespace"]) == ("bearer", "serving")


SIDECAR, DEPLOYMENT = {"mode": "sidecar"}, {"mode": "deployment"}
ROUTE, POOL = {"httpRoute": {"enabled": True}}, {"enabled": True}
NO_POLICY, TLS = {"enabled": False}, {"existingSecret": "a"}
SCALED = {"enabled": True, "minReplicas": 9}
SERVERS = [{"model": "a", "address": "dns:///a-headless:50051"}, {"model": "org/b", "address": "b.other:7000"}]
STANDALONE = {"mode": "standalone", "servers": SERVERS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routing": {"inferencePool": POOL | {"picker": {"name": "a"}}}}, "gateway.mode: must be sidecar"),
        ({"routing": {"inferencePool": POOL}, "gateway": SIDECAR}, "picker.name: must be set"),
        ({"routing": {"labels": "aibrix"}}, "routing.vllmNames: must be true"),
        ({"routing": {"labels": "aibrix", "vllmNames": True}}, "gateway.mode: must be sidecar"),
        ({"routing": {"vllmNames": True}, "metrics": {"enabled": False}}, "metrics.enabled: must be true"),
        ({"routing": ROUTE, "networkPolicy": NO_POLICY}, "must be deployment, sidecar"),
        ({"routing": ROUTE, "gateway": DEPLOYMENT, "networkPolicy": NO_POLICY}, "routing.httpRoute.parentRefs"),
        ({"gateway": DEPLOYMENT, "tls": TLS}, "gateway.server.tlsSecret"),
        ({"gateway": SIDECAR | {"server": {"tlsSecret": "b"}}, "tls": TLS}, "gateway.server.name"),
        ({"gateway": {"mode": "standalone"}}, "gateway.servers: must be set"),
        ({"gateway": DEPLOYMENT | {"servers": SERVERS}}, "gateway.servers: needs gateway.mode standalone"),
        ({"gateway": STANDALONE, "tls": TLS}, "gateway.mode: standalone has no server"),
        ({"gateway": STANDALONE, "tls": {"clientCA": True}}, "gateway.server.tlsSecret: must be set"),
        ({"gateway": STANDALONE | {"servers": [{"model": "a=b", "address": "h:1"}]}}, "model"),
        ({"gateway": STANDALONE | {"servers": [{"model": "a", "address": "h"}]}}, "address"),
        ({"gateway": DEPLOYMENT | {"autoscaling": SCALED}}, "gateway.autoscaling.minReplicas"),
        ({"gateway": DEPLOYMENT | {"service": {"type": "LoadBalancer"}}}, "networkPolicy.callers"),
    ],
)
def test_contradictions_are_refused(changes: Document, message: str) -> None:
    with pytest.raises(HelmError, match=message):
        render(OPEN | changes)
