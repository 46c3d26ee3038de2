"""What the chart refuses: typos and wrong values by its schema, contradictions by its templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart
from helm_python.errors import HelmError

from tests.helm.chart import CHART, OPEN, helm_3, needs_helm_3, render
from tools.chart_schema import SCHEMA, schema

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
FREE = {"config", "affinity", "nodeSelector", "annotations", "labels", "podAnnotations", "podLabels", "requests"}
FREE |= {"limits"}
"""Maps whose names are the user's; those of `config` are tried apart."""


def paths(values: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*before, key)
        if isinstance(value, dict) and key not in FREE:
            yield from paths(value, (*before, key))


PATHS = [*paths(DEFAULTS)]


def at(path: tuple[str, ...], value: object) -> dict[str, Any]:
    made: Any = value
    for key in reversed(path):
        made = {key: made}
    values: dict[str, Any] = OPEN | made
    return values


def misspelt(path: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    wrong = path[-1][:-1] + "x" + path[-1][-1]
    return at((*path[:-1], wrong), "anything"), wrong


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_every_typo_is_refused_by_name(path: tuple[str, ...]) -> None:
    values, wrong = misspelt(path)
    with pytest.raises(HelmError, match=f"'{wrong}' not allowed"):
        Chart.load(CHART).validate_schema(values)


@pytest.mark.system
@needs_helm_3
@pytest.mark.parametrize("path", PATHS[::12], ids=".".join)
def test_helm_3_refuses_it_too(path: tuple[str, ...], tmp_path: Path) -> None:
    values, wrong = misspelt(path)
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = helm_3(file, "1.34.0")
    assert done.returncode == 1
    assert f"Additional property {wrong} is not allowed" in done.stderr


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("config", "max_runing"), 8),
        (("config", "max_running"), "many"),
        (("config", "strategy"), 3),
        (("config", "port"), 50051),  # the chart sets it
        (("replicas",), -1),
        (("image", "digest"), "sha256:abc"),
        (("device", "type"), "tpu"),
        (("device", "count"), 0),
        (("store", "mode"), "redis"),
        (("store", "external", "url"), "localhost:6379"),
        (("service", "port"), 0),
        (("service", "type"), "clusterip"),
        (("rollout", "maxSurge"), "some"),
        (("probes", "readiness", "failureTreshold"), 1),
        (("autoscaling", "type"), "vpa"),
        (("otlp", "endpoint"), "collector:4317"),
        (("otlp", "traceShare"), 2),
        (("logFormat",), "xml"),
        (("resources", "limit"), {"memory": "4Gi"}),
        (("tenants",), [{"name": "tenants/a", "wieght": 2}]),
        (("tenants",), [{"name": "tenants/a", "learning": {"idleTtl": "1 day"}}]),
        (("experiments",), [{"name": "experiments/a", "state": "RUNNING"}]),
        (("extraEnv",), [{"nam": "A"}]),
        (("imagePullSecrets",), [{"nmae": "registry"}]),
        (("tolerations",), [{"keys": "nvidia.com/gpu"}]),
        (("networkPolicy", "callers"), [{"podselector": {}}]),
    ],
    ids=lambda given: ".".join(given) if isinstance(given, tuple) else "",
)
def test_wrong_values_are_refused_by_name(path: tuple[str, ...], value: object) -> None:
    with pytest.raises(HelmError, match=path[-1]):
        Chart.load(CHART).validate_schema(at(path, value))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"auth": {}}, "auth: say who may call"),
        ({"auth": {"open": True, "jwt": {"jwks": "https://a.example"}}}, "auth.open: cannot be combined"),
        ({"auth": {"jwt": {"jwks": "https://a.example"}}}, "issuer and audience must be set"),
        ({"tls": {"clientCA": True}}, "tls.existingSecret"),
        ({"store": {"mode": "external"}}, "url or existingSecret must be set"),
        ({"store": {"mode": "external", "external": {"url": "redis://u:secret@h"}}}, "holds a password"),
        ({"store": {"mode": "external", "external": {"url": "redis://u:p/w@h"}}}, "holds a password"),
        ({"store": {"mode": "external", "external": {"url": "redis://h?password=x"}}}, "holds a password"),
        ({"model": {"existingClaim": "models"}}, "model.name: must be set"),
        ({"model": {"name": "a/b"}}, "model.offline: must be false"),
        ({"model": {"draftModel": "a/b"}}, "model.offline: must be false for a draftModel of the hub"),
        ({"model": {"draftHead": "head"}}, "model.draftHead: must be auto, mtp or none, or model.existingClaim"),
        ({"model": {"fetch": {"draftHead": "a/b"}}}, "model.fetch.source: must be set, since model.fetch.draftHead"),
        (
            {"model": {"draftHead": "none", "fetch": {"source": "a/b", "draftHead": "a/c"}}},
            "model.draftHead: must not be",
        ),
        (
            {"engine": "vllm", "device": {"type": "nvidia"}, "model": {"draftModel": "a/b", "offline": False}},
            "engine: must be draftwood, since model.draftModel",
        ),
        ({"metrics": {"enabled": False}, "autoscaling": {"type": "hpa"}}, "metrics.enabled: must be true"),
        ({"rollout": {"maxSurge": 0, "maxUnavailable": "0"}}, "cannot both be 0"),
        ({"rollout": {"maxSurge": "0%"}}, "cannot both be 0"),
        ({"device": {"type": "nvidia"}, "rollout": {"maxUnavailable": 0}}, "cannot both be 0"),
        ({"autoscaling": {"minReplicas": 9}}, "autoscaling.minReplicas"),
        ({"extraEnv": [{"name": "DRAFTWOOD_DRAIN_GRACE", "value": "600"}]}, "extraEnv"),
        ({"podLabels": {"app.kubernetes.io/name": "x"}}, "podLabels"),
        ({"service": {"type": "LoadBalancer"}}, "networkPolicy.callers"),
        ({"networkPolicy": {"enabled": False}, "ingress": {"enabled": True}}, "ingress.host"),
        ({"networkPolicy": {"enabled": False}, "grpcRoute": {"enabled": True}}, "grpcRoute.parentRefs"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError, match=message):
        render(OPEN | values)


def test_the_schema_is_current() -> None:
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == schema(), "python -m tools.chart_schema"
