"""What KEDA and the autoscaler of Kubernetes ask for is exported, by the server and by the gateway."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import httpx
import promql_parser as promql
import pytest

from draftwood_service.gateway.app import Metrics
from tests.helm.chart import OPEN, render
from tests.helm.test_renders import of_kind, values
from tests.monitoring.expressions import exposed, problems


def queries(**autoscaling: Any) -> list[str]:
    """Of KEDA, with these values."""
    gateway = {"mode": "deployment"}
    documents = render(OPEN | {"gateway": gateway, "autoscaling": {"type": "keda"} | autoscaling})
    triggers = of_kind(documents, "ScaledObject")["spec"]["triggers"]
    return [trigger["metadata"]["query"] for trigger in triggers]


def scaled_by(values: dict[str, Any]) -> list[str]:
    """Metrics of pods that the autoscaler of Kubernetes asks for."""
    spec = of_kind(render(values), "HorizontalPodAutoscaler")["spec"]
    return [one["pods"]["metric"]["name"] for one in spec["metrics"]]


def page_of_gateway() -> str:
    metrics = Metrics()
    metrics.begin("/v1/completions")(200)
    return metrics.text().decode()


@pytest.mark.system
@pytest.mark.timeout(600)  # as long as a service may start, and be audited
def test_every_query_names_what_is_exported(series: dict[str, set[str]]) -> None:
    series = series | exposed(page_of_gateway())
    assert [problem for query in queries(minReplicas=0) for problem in problems(query, series)] == []
    assert {*scaled_by(values("cluster-tenants"))} <= series.keys()
    for query in queries(minReplicas=0):
        assert 'namespace="serving"' in query
        assert 'service="demo-draftwood-headless"' in query or 'service="demo-draftwood-gateway"' in query


def test_queries_select_the_services_that_monitors_collect() -> None:
    documents = render(values("gateway"))
    for monitor in (document for document in documents if document["kind"] == "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        collected = [
            document["metadata"]["name"]
            for document in documents
            if document["kind"] == "Service" and selector.items() <= document["metadata"]["labels"].items()
        ]
        assert len(collected) == 1
        triggers = of_kind(documents, "ScaledObject")["spec"]["triggers"]
        assert any(f'service="{collected[0]}"' in trigger["metadata"]["query"] for trigger in triggers)


@pytest.mark.parametrize("query", queries(minReplicas=0))
def test_every_query_has_one_value(query: str) -> None:
    """KEDA fails on more: the outermost operation is an aggregation, or a quotient of two."""
    expression: Any = promql.parse(query)
    for side in (expression.lhs, expression.rhs) if isinstance(expression, promql.BinaryExpr) else (expression,):
        assert isinstance(side, promql.AggregateExpr)
        assert side.modifier is None


def test_only_scale_to_zero_asks_the_gateway() -> None:
    assert not any("gateway" in query for query in queries(minReplicas=1))
    assert any("last_request_timestamp" in query for query in queries(minReplicas=0, idleSeconds=300))
    assert any("< bool 300" in query for query in queries(minReplicas=0, idleSeconds=300))


def test_a_gateway_notes_when_it_had_a_request_though_no_server_runs() -> None:
    """Health checks and collections do not count, or pods would never end."""
    from draftwood_service.gateway.app import Gateway
    from draftwood_service.gateway.services import ServiceClient

    async def ask() -> tuple[int, str, int, str]:
        made = Gateway({"": lambda _: ServiceClient(nobody)}, max_body_bytes=2**20)
        transport = httpx.ASGITransport(made.app([]))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            health = (await client.get("/health")).status_code
            before = (await client.get("/metrics")).text
            asked = await client.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 4})
            return health, before, asked.status_code, (await client.get("/metrics")).text

    with socket.socket() as held:  # does not listen, and no other process gets its port
        held.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{held.getsockname()[1]}"
        health, before, status, after = asyncio.run(ask())
    name = "draftwood_gateway_last_request_timestamp_seconds"
    assert (health, status) == (503, 503)
    assert f"{name} 0.0" in before
    [line] = [text for text in after.splitlines() if text.startswith(f"{name} ")]
    assert abs(time.time() - float(line.split()[1])) < 60
