"""What pods are given: resources by device and engine, threads, storage, users, and a store that they share."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helm_python.errors import HelmError

from tests.helm.chart import OPEN, Document, needs_helm_3, pod_templates, read, render, render_3
from tests.helm.test_renders import allowed_ports, by_values_with_a_server, of_kind, pod_of, server_of, values

HPA = {"type": "hpa", "minReplicas": 1, "maxReplicas": 2}
GIB = 2**30
UNITS = {"": 1, "Mi": 2**20, "Gi": GIB}


def quantity(text: Any) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)(|Mi|Gi)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def volume(documents: list[Document], name: str) -> Any:
    return next(one for one in pod_of(documents)["volumes"] if one["name"] == name)


def test_a_gpu_has_room_for_8b_parameters_in_bfloat16() -> None:
    """The values that a user of the hub writes, and nothing more."""
    weights = 8.2e9 * 2
    documents = render(OPEN | {"device": {"type": "nvidia"}, "model": {"name": "Qwen/Qwen3-8B", "offline": False}})
    given = server_of(documents)["resources"]
    cache = quantity(volume(documents, "cache")["emptyDir"]["sizeLimit"])
    assert quantity(given["limits"]["memory"]) >= 1.5 * weights
    assert cache >= 2.5 * weights
    assert quantity(given["limits"]["ephemeral-storage"]) > cache
    assert int(given["requests"]["cpu"]) >= 4
    assert quantity(volume(documents, "shm")["emptyDir"]["sizeLimit"]) >= GIB
    assert pod_of(documents)["terminationGracePeriodSeconds"] == 5 + 120 + 5


@pytest.mark.parametrize(
    ("given", "memory"),
    [
        ({"limits": {"memory": "16Gi"}}, ("16Gi", "16Gi")),
        ({"requests": {"memory": "64Gi"}}, ("64Gi", "64Gi")),
        ({"requests": {"memory": "8Gi"}, "limits": {"memory": "16Gi"}}, ("8Gi", "16Gi")),
    ],
)
def test_a_request_is_never_above_its_limit(given: Document, memory: tuple[str, str]) -> None:
    made = server_of(render(OPEN | {"device": {"type": "nvidia"}, "resources": given}))["resources"]
    assert (made["requests"]["memory"], made["limits"]["memory"]) == memory


@by_values_with_a_server
def test_every_container_says_how_much_it_writes(path: Any) -> None:
    """A pod without a limit can fill its node's disk."""
    documents = render(read(path))
    for pod in (template["spec"] for template in pod_templates(documents, "Deployment", "LeaderWorkerSet")):
        for container in pod["containers"]:
            assert all("ephemeral-storage" in container["resources"][part] for part in ("requests", "limits"))
        assert all("sizeLimit" in each["emptyDir"] for each in pod["volumes"] if "emptyDir" in each)
    shm = quantity(volume(documents, "shm")["emptyDir"]["sizeLimit"])
    assert shm <= quantity(server_of(documents)["resources"]["limits"]["memory"]) / 4


def test_threads_are_those_of_the_cpus_that_the_pod_has() -> None:
    def threads(**changes: Any) -> Any:
        found = [one for one in server_of(render(OPEN | changes))["env"] if one["name"] == "DRAFTWOOD_THREADS"]
        return found[0]["valueFrom"]["resourceFieldRef"]["resource"] if found else None

    assert threads() == "requests.cpu"  # there is no limit, so no quota either
    assert threads(resources={"limits": {"cpu": "2500m"}}) is None  # the server reads the quota, and rounds it down
    assert threads(config={"threads": 3}) is None


def test_what_is_compiled_outlives_a_pod_on_a_claim_of_the_release() -> None:
    gpus = {"device": {"type": "nvidia", "count": 2}, "engine": "vllm", "replicas": 3}
    documents = render(OPEN | gpus | {"cache": {"claim": {"create": True, "storageClass": "shared"}}})
    claim = of_kind(documents, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert (claim["spec"]["storageClassName"], claim["spec"]["resources"]["requests"]["storage"]) == ("shared", "100Gi")
    assert volume(documents, "cache")["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    server = server_of(documents)
    assert server["resources"]["limits"]["ephemeral-storage"] == "3Gi"
    [mounted] = [mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] == "cache"]
    variables = {one["name"]: one.get("value") for one in server["env"]}
    for name in ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR", "HF_HOME"):
        assert f"{variables[name]}/".startswith(f"{mounted}/"), name


def test_a_claim_for_one_pod_is_given_up_before_the_next_pod_starts() -> None:
    claim = {"claim": {"create": True, "accessMode": "ReadWriteOnce"}}
    documents = render(OPEN | {"replicas": 1, "cache": claim})
    assert of_kind(documents, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    with pytest.raises(HelmError, match=r"cache\.claim\.accessMode: ReadWriteOnce is for one pod"):
        render(OPEN | {"cache": claim})
    with pytest.raises(HelmError, match=r"cannot be combined with cache\.existingClaim"):
        render(OPEN | {"cache": {"claim": {"create": True}, "existingClaim": "a"}})


def test_a_model_is_fetched_once_to_a_claim_that_pods_share() -> None:
    fetch = {"source": "org/model@v1", "size": "20Gi", "storageClass": "shared"}
    documents = render(OPEN | {"model": {"fetch": fetch, "hubTokenSecret": "hub"}})
    claim = of_kind(documents, "PersistentVolumeClaim")
    assert (claim["metadata"]["name"], claim["spec"]["accessModes"]) == ("demo-draftwood-models", ["ReadWriteMany"])
    mounted = volume(documents, "models")["persistentVolumeClaim"]
    assert mounted == {"claimName": "demo-draftwood-models", "readOnly": False}
    checks, fetches = pod_of(documents)["initContainers"]
    assert checks["args"][:2] == ["serve", "--check=without-model"]
    assert fetches["args"] == ["models", "org/model@v1", "--to=/models/model"]
    token = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert [one["valueFrom"] for one in fetches["env"] if one["name"] == "HF_TOKEN"] == [token]
    server = server_of(documents)
    assert not [one for one in server["env"] if one["name"] == "HF_TOKEN"]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in server["volumeMounts"]
    config = json.loads(of_kind(documents, "ConfigMap", "draftwood")["data"]["draftwood.yaml"])
    assert config["model"] == "/models/model"
    for more, problem in (
        ({"model": {"fetch": fetch, "existingClaim": "a", "name": "b"}}, r"model\.fetch\.source: cannot be combined"),
        ({"model": {"fetch": {**fetch, "accessMode": "ReadWriteOnce"}}}, r"model\.fetch\.accessMode: ReadWriteOnce is"),
    ):
        with pytest.raises(HelmError, match=problem):
            render(OPEN | more)


def test_a_model_in_s3_is_fetched_with_the_secrets_key_from_an_endpoint() -> None:
    minio = "https://minio.storage:9000"
    own = {"existingSecret": "minio", "endpoint": minio, "tlsSecret": "minio-ca", "region": "eu-1"}
    fetch: Document = {"source": "s3://models/team/q4.gguf", "s3": own}
    documents = render(OPEN | {"model": {"fetch": fetch, "hubTokenSecret": "hub"}})
    _, fetches = pod_of(documents)["initContainers"]
    assert fetches["args"] == ["models", "s3://models/team/q4.gguf", "--to=/models/q4"]
    variables = {one["name"]: one.get("value") or one["valueFrom"]["secretKeyRef"] for one in fetches["env"]}
    assert {name: value for name, value in variables.items() if not name.startswith("H")} == {
        "AWS_ACCESS_KEY_ID": {"name": "minio", "key": "AWS_ACCESS_KEY_ID"},
        "AWS_SECRET_ACCESS_KEY": {"name": "minio", "key": "AWS_SECRET_ACCESS_KEY"},
        "AWS_ENDPOINT_URL": minio,
        "AWS_CA_BUNDLE": "/etc/draftwood/s3-tls/ca.crt",
        "AWS_REGION": "eu-1",
    }
    assert not [one for one in server_of(documents)["env"] if one["name"].startswith("AWS")]
    assert volume(documents, "s3-tls")["secret"]["secretName"] == "minio-ca"
    for endpoint, more in ((minio, {9000}), ("http://ceph.storage", {80}), ("https://s3.example", set[int]())):
        fetch["s3"] = own | {"endpoint": endpoint}
        assert allowed_ports(render(OPEN | {"model": {"fetch": fetch}})) == {443, 6379} | more
    # By the role of the service account.
    documents = render(values("eks"))
    assert "eks.amazonaws.com/role-arn" in of_kind(documents, "ServiceAccount")["metadata"]["annotations"]
    fetches = pod_of(documents)["initContainers"][1]
    assert not [one for one in fetches["env"] if one["name"].startswith("AWS")]
    for source in ("s3://bucket", "s3:/bucket/model", "s3://bucket/a b", "model"):
        with pytest.raises(HelmError, match="source"):
            render(OPEN | {"model": {"fetch": {"source": source}}})


def test_a_cluster_may_choose_the_user() -> None:
    security = pod_of(render(OPEN))["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (10001, 10001, 10001)
    assert_no_user(render(OPEN | {"runAsUser": None}))


@pytest.mark.system
@needs_helm_3
def test_openshift_is_known_by_its_api(tmp_path: Path) -> None:
    """It refuses pods that name a user, unless their service account may."""
    file = tmp_path / "values.yaml"
    file.write_text("auth: {open: true}")
    assert pod_of(render_3(file, "1.34.0"))["securityContext"]["runAsUser"] == 10001
    assert_no_user(render_3(file, "1.34.0", "--api-versions", "security.openshift.io/v1"))


def assert_no_user(documents: list[Document]) -> None:
    contexts = [template["spec"]["securityContext"] for template in pod_templates(documents)]
    assert len(contexts) >= 2
    for context in contexts:
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & context.keys()
        assert context["runAsNonRoot"] is True


@pytest.mark.parametrize("mode", ["valkey", "external", None])
def test_several_pods_share_a_store(mode: str | None) -> None:
    """Otherwise a purge, a tenant and a limit would hold in one of them."""
    store: dict[str, Any] = {"mode": mode, "external": {"url": "redis://cache.example" if mode == "external" else ""}}
    documents = render(OPEN | {"replicas": 5, "store": store if mode else {}})
    assert of_kind(documents, "Deployment")["spec"]["replicas"] == 5
    if mode == "external":
        data = of_kind(documents, "ConfigMap", "draftwood")["data"]["draftwood.yaml"]
        assert '"store": "redis://cache.example"' in data
    else:
        assert "DRAFTWOOD_STORE" in {each["name"] for each in server_of(documents)["env"]}


@pytest.mark.parametrize("mode", ["memory", "embedded"])
@pytest.mark.parametrize(
    ("pods", "fix"),
    [
        ({"replicas": 2}, "replicas"),
        ({"replicas": 1, "autoscaling": {"type": "keda"}}, "autoscaling.maxReplicas"),
        ({"replicas": 1, "autoscaling": HPA}, "autoscaling.maxReplicas"),
    ],
)
def test_several_pods_without_a_shared_store_are_refused_with_what_to_set(mode: str, pods: Document, fix: str) -> None:
    with pytest.raises(HelmError, match=f"store.mode: {mode} is for one pod.*valkey.*external.*{fix} to 1"):
        render(OPEN | pods | {"store": {"mode": mode}})


@pytest.mark.parametrize("url", ["redis://localhost:6379", "redis://127.0.0.1", "rediss://[::1]:6379/0"])
def test_a_store_in_the_pod_is_not_shared(url: str) -> None:
    store = {"mode": "external", "external": {"url": url}}
    with pytest.raises(HelmError, match=re.escape(f"store.external.url: {url} is in each pod")):
        render(OPEN | {"store": store})
    render(OPEN | {"store": store, "replicas": 1})
    render(OPEN | {"store": {"mode": "external", "external": {"url": "redis://localhost.example"}}, "replicas": 1})


def test_one_pod_may_be_scaled_by_hand_or_from_zero_without_a_shared_store() -> None:
    embedded = OPEN | {"store": {"mode": "embedded"}}
    by_hand = render(embedded | {"replicas": 1})
    assert [one["spec"]["replicas"] for one in by_hand if one["kind"] in ("Deployment", "StatefulSet")] == [1]
    scaled = {"type": "keda", "minReplicas": 0, "maxReplicas": 1}
    documents = render(embedded | {"autoscaling": scaled, "gateway": {"mode": "deployment"}})
    scaler = of_kind(documents, "ScaledObject")["spec"]
    assert (scaler["minReplicaCount"], scaler["maxReplicaCount"]) == (0, 1)


def test_engines_that_the_chart_cannot_run_are_refused() -> None:
    with pytest.raises(HelmError, match=r"device\.type: must be nvidia"):
        render(OPEN | {"engine": "vllm"})
    with pytest.raises(HelmError, match="engine"):
        render(OPEN | {"engine": "sglang"})
