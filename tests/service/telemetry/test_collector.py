"""Traces, metrics and logs over OTLP, to a collector that is there and to one that is not."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
import psutil
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

from draftwood_client import AsyncClient
from draftwood_model_runner.errors import InvalidValueError
from draftwood_service.settings import Settings
from draftwood_service.telemetry import names, opened_telemetry
from tests.service.fakes import answer, serving, until
from tests.service.gateway.listening import listening, post
from tests.service.rpc.test_endings import ask

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)


@dataclass
class Collector:
    """What has arrived over OTLP.

    Attributes:
        spans, logs: as in the protocol.
        metrics: names.
        resources: attributes of the resources of spans.
    """

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)
    logs: list[Any] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)
    resources: list[dict[str, str]] = field(default_factory=list)

    def export(self, request: Any, context: Any) -> None:
        """A call of one of the three services."""
        match request:
            case ExportTraceServiceRequest():
                for traced in request.resource_spans:
                    self.resources.append(attributes(traced.resource))
                    self.spans += [span for scope in traced.scope_spans for span in scope.spans]
            case ExportMetricsServiceRequest():
                for measured in request.resource_metrics:
                    self.metrics |= {metric.name for scope in measured.scope_metrics for metric in scope.metrics}
            case ExportLogsServiceRequest():
                for logged in request.resource_logs:
                    self.logs += [line for scope in logged.scope_logs for line in scope.log_records]

    def span(self, name: str) -> Any:
        """The only span of this name."""
        [span] = [one for one in self.spans if one.name == name]
        return span


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span, log line or resource."""
    return {attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in of.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    got, server = Collector(), grpc.server(ThreadPoolExecutor(4))
    for name, request in (
        ("trace.v1.TraceService", ExportTraceServiceRequest),
        ("metrics.v1.MetricsService", ExportMetricsServiceRequest),
        ("logs.v1.LogsService", ExportLogsServiceRequest),
    ):
        export: Any = grpc.unary_unary_rpc_method_handler(got.export, request.FromString, lambda nothing: b"")
        service = grpc.method_handlers_generic_handler(f"opentelemetry.proto.collector.{name}", {"Export": export})
        server.add_generic_rpc_handlers((service,))
    got.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield got
    server.stop(None).wait()


async def test_a_request_is_a_tree_of_spans_in_the_callers_trace(collector: Collector) -> None:
    tracer = TracerProvider().get_tracer("caller")
    async with serving(otlp_endpoint=collector.endpoint, trace_share=0.0) as served:
        with tracer.start_as_current_span("question") as span:
            async with AsyncClient(served.server.address, tenant="acme") as client:
                await client.generate("secret words", max_tokens=20, request_id="mine")
    context = span.get_span_context()
    assert {int(one.trace_id.hex(), 16) for one in collector.spans} == {context.trace_id}
    call = collector.span("draftwood.v1.GenerationService/GenerateStream")
    assert int(call.parent_span_id.hex(), 16) == context.span_id
    assert attributes(call)[names.RPC_STATUS] == "OK"
    request = collector.span("text_completion fake")
    assert request.parent_span_id == call.span_id
    found = attributes(request)
    assert (found[names.INPUT_TOKENS], found[names.OUTPUT_TOKENS]) == (12, 20)
    assert (found[names.TENANT], found[names.RESPONSE_ID], found[names.STRATEGY]) == ("acme", "mine", "hybrid")
    assert found[names.ACCEPTANCE_LENGTH] == 2.0
    parts = [collector.span(name) for name in ("queue", "prefill", "decode")]
    assert all(part.parent_span_id == request.span_id for part in parts)
    for before, after in pairwise(parts):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    for inner in parts:
        assert call.start_time_unix_nano <= inner.start_time_unix_nano <= inner.end_time_unix_nano
        assert inner.end_time_unix_nano <= call.end_time_unix_nano
    assert "secret words" not in str(collector.spans)
    assert collector.resources[0]["service.name"] == "draftwood"


async def test_the_trace_of_a_gateways_caller_goes_on_in_the_service(collector: Collector) -> None:
    trace = f"traceparent: 00-{TRACE}-{PARENT}-01\r\ntracestate: a=b\r\n"
    async with (
        serving(otlp_endpoint=collector.endpoint, trace_share=0.0) as served,
        listening(served.server.address) as gateway,
    ):
        sent = post("/v1/completions", {"prompt": "hello", "max_tokens": 4, "model": "fake"})
        for headers in (trace, "traceparent: none\r\n"):
            with_trace = sent.replace(b"host: x\r\n", f"host: x\r\n{headers}".encode())
            assert (await gateway.answered(with_trace))[0] == 200
    [call] = [span for span in collector.spans if span.name == "draftwood.v1.GenerationService/GenerateStream"]
    assert (call.trace_id.hex(), call.parent_span_id.hex(), call.trace_state) == (TRACE, PARENT, "a=b")


async def test_errors_and_cancellations_are_marked(collector: Collector) -> None:
    async with serving(otlp_endpoint=collector.endpoint, trace_share=1.0) as served:
        served.engine.step_error = RuntimeError("broken")
        await answer(served.stub.GenerateStream(ask("hello", 20)))
    call, request = (
        collector.span(name) for name in ("draftwood.v1.GenerationService/GenerateStream", "text_completion fake")
    )
    assert attributes(call)[names.ERROR_TYPE] == "UNAVAILABLE"
    assert attributes(request)[names.ERROR_TYPE] == "engine_stopped"
    assert call.status.code == request.status.code == 2


async def test_the_share_decides_if_the_caller_has_not(collector: Collector) -> None:
    unsampled = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
    for share, metadata in ((0.0, ()), (1.0, unsampled)):
        async with serving(otlp_endpoint=collector.endpoint, trace_share=share) as served:
            await answer(served.stub.GenerateStream(ask("hello", 4), metadata=metadata))
    assert collector.spans == []


async def test_metrics_and_log_lines_arrive(collector: Collector, logged: io.StringIO) -> None:
    async with serving(otlp_endpoint=collector.endpoint, log_level="info") as served:
        await answer(served.stub.GenerateStream(ask("hello", 4, request_id="mine"), metadata=SAMPLED))
    assert {names.REQUEST_DURATION.name, "draftwood.requests.running", "draftwood.store.up"} <= collector.metrics
    [line] = [log for log in collector.logs if log.body.string_value == "request"]
    assert line.trace_id.hex() == TRACE
    assert attributes(line)["request_id"] == "mine"
    assert f'"trace_id": "{TRACE}"' in logged.getvalue()


async def test_a_signal_can_be_left_out(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "none")
    async with serving(otlp_endpoint=collector.endpoint, trace_share=1.0) as served:
        await answer(served.stub.GenerateStream(ask("hello", 4)))
    assert collector.metrics
    assert not collector.spans
    assert not collector.logs


@pytest.mark.system  # its exporters try for ten more seconds
async def test_a_collector_that_is_away_costs_nothing(logged: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    before = {*threading.enumerate()}
    async with serving(otlp_endpoint="http://127.0.0.1:9", trace_share=1.0) as served:
        for _ in range(20):
            assert (await answer(served.stub.GenerateStream(ask("hello", 4)))).error is None
        await until(lambda: "telemetry is not delivered" in logged.getvalue())
        began = time.perf_counter()
    assert time.perf_counter() - began < 5.0
    assert logged.getvalue().count("telemetry is not delivered") == 1
    for thread in {*threading.enumerate()} - before:  # what an exporter logs later would be another test's
        if thread.name.startswith("Otel") or thread.name.endswith("(shutdown)"):
            await asyncio.to_thread(thread.join, 30)


def listened_ports() -> set[int]:
    """On which this process listens."""
    found = psutil.Process().net_connections()
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


def test_an_unknown_protocol_is_refused_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    listening_before = listened_ports()
    handlers = list(logging.getLogger("opentelemetry").handlers)
    with pytest.raises(InvalidValueError, match="grpc, http/protobuf"):
        opened_telemetry(Settings(otlp_endpoint="http://127.0.0.1:4317", metrics_port=0))
    assert logging.getLogger("opentelemetry").handlers == handlers
    assert listened_ports() <= listening_before


async def test_http_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    paths: list[str] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(length)
        paths.append(head.split(b" ")[1].decode())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    collector = await asyncio.start_server(take, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{collector.sockets[0].getsockname()[1]}"
    async with serving(otlp_endpoint=endpoint, trace_share=1.0) as served:
        await answer(served.stub.GenerateStream(ask("hello", 4)))
    await until(lambda: {*paths} >= {"/v1/traces", "/v1/metrics", "/v1/logs"})
    collector.close()
    await collector.wait_closed()
