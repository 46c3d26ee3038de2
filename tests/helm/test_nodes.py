"""A model over several pods: a LeaderWorkerSet, of whose groups one pod serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate
import pytest
from helm_python.errors import HelmError

from tests.helm.chart import Document, pod_templates, render
from tests.helm.test_gateway import strict_schema
from tests.helm.test_renders import of_kind, settings_of, values

NODES = values("vllm-nodes")


def rendered(**changes: Any) -> list[Document]:
    return render(NODES | changes)


def selects(selector: Document, labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert all(one["operator"] == "In" for one in expressions)
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )


def labels_of(documents: list[Document]) -> tuple[dict[str, str], dict[str, str]]:
    leader, worker = pod_templates(documents, "LeaderWorkerSet")
    return leader["metadata"]["labels"], worker["metadata"]["labels"]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_set_and_its_templates_are_valid(version: str) -> None:
    documents = rendered()
    schema = strict_schema("leaderworkerset")
    for part in ("leaderTemplate", "workerTemplate"):  # are of Kubernetes
        schema["properties"]["leaderWorkerTemplate"]["properties"][part]["additionalProperties"] = True
    jsonschema.validate(of_kind(documents, "LeaderWorkerSet")["spec"], schema)
    for template in pod_templates(documents, "LeaderWorkerSet"):
        made = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": template}
        kubernetes_validate.validate(made, version, strict=True)
    assert not [one for one in documents if one["kind"] == "Deployment"]


def test_the_workers_do_what_the_leader_does_and_serve_nothing() -> None:
    leader, worker = (template["spec"] for template in pod_templates(rendered(), "LeaderWorkerSet"))
    [server], [other] = leader["containers"], worker["containers"]
    assert server.keys() - other.keys() == {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    assert all(server[key] == value for key, value in other.items())
    assert {**leader, "containers": []} == {**worker, "containers": []}
    assert other["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert [one["name"] for one in worker["initContainers"]] == ["check"]


def test_a_gateway_beside_the_server_is_beside_the_leader_alone() -> None:
    made = pod_templates(rendered(gateway={"mode": "sidecar"}), "LeaderWorkerSet")
    assert [[one["name"] for one in each["spec"]["containers"]] for each in made] == [["server", "gateway"], ["server"]]


def test_both_read_the_same_settings_but_for_their_number(tmp_path: Path) -> None:
    documents = rendered()
    for rank in range(2):
        settings = settings_of(documents, tmp_path, rank)
        assert (settings.nodes, settings.node_rank, settings.leader) == (2, rank, "demo-0.demo.serving")
        assert (settings.tensor_parallel, settings.pipeline_parallel) == (16, 1)
    divided = settings_of(rendered(nodes={"count": 2, "pipelineParallel": 2}), tmp_path)
    assert (divided.tensor_parallel, divided.pipeline_parallel, divided.nodes) == (8, 2, 2)


def test_services_and_scalers_see_leaders_and_policies_and_budgets_see_all() -> None:
    documents = rendered()
    leader, worker = labels_of(documents)
    for suffix in ("draftwood", "-headless"):
        selector = {"matchLabels": of_kind(documents, "Service", suffix)["spec"]["selector"]}
        assert (selects(selector, leader), selects(selector, worker)) == (True, False)
    policy = of_kind(documents, "NetworkPolicy", "draftwood")["spec"]
    for selector in (policy["podSelector"], of_kind(documents, "PodDisruptionBudget")["spec"]["selector"]):
        assert (selects(selector, leader), selects(selector, worker)) == (True, True)
    target = of_kind(documents, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    group = of_kind(documents, "LeaderWorkerSet")
    assert target == {key: group[key] for key in ("apiVersion", "kind")} | {"name": group["metadata"]["name"]}
    keda = rendered(autoscaling={"type": "keda"})
    assert of_kind(keda, "ScaledObject")["spec"]["scaleTargetRef"] == target
    # The operator makes a headless service of the set's name.
    assert group["metadata"]["name"] not in {one["metadata"]["name"] for one in documents if one["kind"] == "Service"}


def test_all_ports_are_open_between_the_pods_of_the_release_and_to_nobody_else() -> None:
    documents = rendered()
    labels = labels_of(documents)
    policy = of_kind(documents, "NetworkPolicy", "draftwood")["spec"]
    for way, peers in (("ingress", "from"), ("egress", "to")):
        [rule] = [rule for rule in policy[way] if "ports" not in rule]
        [peer] = rule[peers]
        assert peer.keys() == {"podSelector"}
        assert all(selects(peer["podSelector"], one) for one in labels)
        assert not selects(peer["podSelector"], {"app": "another"})
    one_pod = of_kind(render(values("vllm")), "NetworkPolicy", "draftwood")["spec"]
    assert all("ports" in rule for rule in (*one_pod["ingress"], *one_pod["egress"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "draftwood"}, "nodes.count: must be 1, unless engine is vllm"),
        ({"nodes": {"count": 2, "pipelineParallel": 3}}, "nodes.pipelineParallel: must divide"),
        ({"store": {"mode": "memory"}, "replicas": 1, "autoscaling": {}}, "store.mode: memory is for one pod"),
        ({"cache": {"claim": {"create": True, "accessMode": "ReadWriteOnce"}}}, "ReadWriteOnce is for one pod"),
    ],
)
def test_what_cannot_be_over_nodes_is_refused(changes: Document, message: str) -> None:
    with pytest.raises(HelmError, match=message):
        rendered(**changes)
