"""Metrics as Prometheus collects them from a running server."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.prometheus._mapping import map_unit, sanitize_full_name
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.engine import reports as reporter
from draftwood_service.settings import Settings
from draftwood_service.telemetry import names, opened_telemetry
from draftwood_service.telemetry.metrics import ALIASES
from draftwood_service.telemetry.names import Kind, Metric
from draftwood_service.telemetry.observed import OBSERVED
from draftwood_service.telemetry.open_telemetry import OpenTelemetry
from tests.service.fakes import Served, answer, once, serving, until
from tests.service.rpc.test_endings import ask

DOCS = Path(__file__).parents[3] / "docs" / "telemetry.md"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "REPORT_SECONDS", 0.02)


def exposed_name(metric: Metric) -> str:
    """As the exporter for Prometheus writes it."""
    unit = map_unit(metric.unit)
    name = sanitize_full_name(metric.name)
    name += f"_{unit}" if unit and metric.unit != "1" and not name.endswith(f"_{unit}") else ""
    return name


async def collected(
    served: Served, is_right: Callable[[dict[str, Family]], bool] = lambda families: True
) -> dict[str, Family]:
    """The metrics as soon as they are right: a call that failed is counted after its caller has read why."""
    telemetry = served.server._bound.telemetry
    assert isinstance(telemetry, OpenTelemetry)
    url = f"http://127.0.0.1:{telemetry.metrics_port}/metrics"

    def read() -> dict[str, Family]:
        with urllib.request.urlopen(url, timeout=5) as page:
            return {family.name: family for family in text_string_to_metric_families(page.read().decode())}

    return await once(lambda: asyncio.to_thread(read), is_right)


def value(families: dict[str, Family], name: str, **labels: str) -> float:
    """The sum of the samples with these labels; of a histogram, their number."""
    samples = [sample for sample in families[name].samples if not sample.name.endswith(("_bucket", "_sum", "_created"))]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


async def test_every_metric_is_exposed_and_no_other() -> None:
    async with serving(metrics_port=0, metrics_tenants=("acme",), audit_share=1.0) as served:
        await answer(served.stub.GenerateStream(ask("hello", 40, tenant="acme")))
        await until(lambda: served.server.audits.counts != {})
        # Sources are counted when a request has ended.
        await until(lambda: any(work.by_source for work in served.server.bridge.reports.latest.work.values()))
        families = await collected(served)
    expected = {exposed_name(metric) for metric in (*names.RECORDED, *OBSERVED)}
    expected.remove("draftwood_draft_accepted_by_depth")  # the fake engine has no depths
    assert families.keys() == expected | {"target_info"}
    for metric in (*names.RECORDED, *OBSERVED):
        for sample in families[exposed_name(metric)].samples if exposed_name(metric) in families else ():
            allowed = {name.replace(".", "_") for name in metric.attributes} | {"le"}
            assert sample.labels.keys() <= allowed


async def test_the_load_has_vllms_names_too_if_asked_for() -> None:
    """With the same values, and the model as vLLM's metrics have it."""
    async with serving(metrics_port=0, metrics_vllm_names=True) as served:
        calls = [asyncio.ensure_future(answer(served.stub.GenerateStream(ask("hello", 4000)))) for _ in range(3)]
        await until(lambda: served.server.bridge.reports.latest.load.running == 3)
        served.engine.gate.clear()
        families = await collected(served)
        served.engine.gate.set()
        await asyncio.gather(*calls)
        await until(lambda: served.server.bridge.reports.latest.load.running == 0)
        idle = await collected(served)
        model = served.server.model.name
    for alias, metric in ALIASES.items():
        [sample] = families[alias].samples
        assert families[alias].type == "gauge"
        assert sample.labels == {"model_name": model}
        assert idle[alias].samples[0].value == value(idle, exposed_name(metric))
    assert value(families, "vllm:num_requests_running") == 3
    assert value(families, "vllm:num_requests_waiting") == 0
    assert 0 <= value(families, "vllm:kv_cache_usage_perc") <= 1


async def test_requests_are_measured_by_their_end() -> None:
    async with serving(metrics_port=0, max_draft_nodes=0) as served:
        await answer(served.stub.GenerateStream(ask("hello", 40)))
        bad = await answer(served.stub.GenerateStream(pb.GenerateRequest(text="", stop=pb.StopOptions(max_tokens=4))))
        assert bad.error is not None
        served.engine.gate.clear()
        call = served.stub.GenerateStream(ask("hello", 40))
        await until(lambda: len(served.engine.added) == 2)
        call.cancel()
        served.engine.gate.set()
        await served.assert_idle()
        with pytest.raises(grpc.aio.AioRpcError):
            await served.stub.Tokenize(pb.TokenizeRequest())
        families = await collected(
            served, lambda found: value(found, "rpc_server_call_duration_seconds", error_type="INVALID_ARGUMENT") == 2
        )
    duration = "gen_ai_server_request_duration_seconds"
    assert value(families, duration) == 3
    assert value(families, duration, error_type="cancelled") == 1
    assert value(families, duration, error_type="invalid_value") == 1
    assert value(families, "gen_ai_usage_output_tokens", draftwood_strategy="none") >= 40
    first, each = (f"gen_ai_server_time_{name}_seconds" for name in ("to_first_token", "per_output_token"))
    assert value(families, first) >= value(families, each) == 1
    method = {"rpc_method": "draftwood.v1.GenerationService/GenerateStream"}
    call_duration = "rpc_server_call_duration_seconds"
    for status in ("OK", "INVALID_ARGUMENT", "CANCELLED"):
        assert value(families, call_duration, rpc_response_status_code=status, **method) == 1
    assert value(families, call_duration, error_type="INVALID_ARGUMENT") == 2  # Tokenize, too


async def test_tenants_are_shown_only_where_the_list_names_them() -> None:
    async with serving(metrics_port=0, metrics_tenants=("acme", "beta")) as served:
        for tenant in ("acme", "acme", "secret-customer"):
            await answer(served.stub.GenerateStream(ask("hello", 10, tenant=tenant)))
        await until(lambda: "secret-customer" in served.server.bridge.reports.latest.tenants)
        families = await collected(served)
    labels = {str(sample.labels) for family in families.values() for sample in family.samples}
    assert not any("secret-customer" in label for label in labels)
    assert value(families, "gen_ai_server_request_duration_seconds", draftwood_tenant="acme") == 2
    assert value(families, "gen_ai_server_request_duration_seconds") == 3
    assert value(families, "draftwood_tenant_output_tokens", draftwood_tenant="acme") == 20


async def test_health_is_a_metric() -> None:
    async with serving(metrics_port=0) as served:
        assert value(await collected(served), "draftwood_serving") == 1
        served.engine.may_load.clear()
        served.engine.step_error = RuntimeError("broken")
        await answer(served.stub.GenerateStream(ask("hello", 10)))
        await until(lambda: not served.server.serving)
        assert value(await collected(served), "draftwood_serving") == 0
        served.engine.step_error = None
        served.engine.may_load.set()
        await until(lambda: served.server.recovery.restarts == 1 and served.server.serving)
        assert value(await collected(served), "draftwood_engine_restarts") == 1


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidInputError, match="metrics_port"):
            opened_telemetry(Settings(metrics_port=taken.getsockname()[1]))


def documented() -> Iterator[tuple[str, ...]]:
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `") and line.count("|") == 6:
            yield tuple(cell.strip().strip("`") for cell in line.strip("|").split("|"))


def test_the_docs_list_every_metric() -> None:
    kinds = {Kind.COUNTER: "counter", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}
    suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: ""}
    expected = {
        (one.name, exposed_name(one) + suffix[one.kind], kinds[one.kind], one.unit, one.description)
        for one in (*names.RECORDED, *OBSERVED)
    }
    assert {*documented()} == expected
