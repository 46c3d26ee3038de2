"""A collector of OpenTelemetry that keeps what it gets: OTLP over gRPC, on a free port."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class Collector:
    """What has arrived.

    Attributes:
        spans, logs: as in the protocol.
        metrics: names.
        resources: attributes of each message's resource.
    """

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)
    logs: list[Any] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)
    resources: list[dict[str, str]] = field(default_factory=list)

    def span(self, name: str) -> Any:
        """The only span of this name."""
        [span] = [one for one in self.spans if one.name == name]
        return span


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span, log line or resource."""
    return {attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in of.attributes}


@contextmanager
def running_collector() -> Iterator[Collector]:
    got = Collector()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            for part in request.resource_spans:
                got.resources.append(attributes(part.resource))
                got.spans += [span for scope in part.scope_spans for span in scope.spans]
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            for part in request.resource_metrics:
                got.metrics |= {metric.name for scope in part.scope_metrics for metric in scope.metrics}
            return metrics_service_pb2.ExportMetricsServiceResponse()

    class Logs(logs_service_pb2_grpc.LogsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            for part in request.resource_logs:
                got.logs += [line for scope in part.scope_logs for line in scope.log_records]
            return logs_service_pb2.ExportLogsServiceResponse()

    server: Any = grpc.server(ThreadPoolExecutor(4))
    register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    register(Traces(), server)
    register = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    register(Metrics(), server)
    register = logs_service_pb2_grpc.add_LogsServiceServicer_to_server
    register(Logs(), server)
    got.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield got
    finally:
        server.stop(None).wait()
