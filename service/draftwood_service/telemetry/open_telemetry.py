"""OpenTelemetry's providers and exporters, by gRPC or HTTP as its own variables say, and the port for Prometheus.

Log lines go over OTLP beside those on standard error. What OpenTelemetry itself logs is shown once a minute at most.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import entry_points, version
from typing import Any
from wsgiref.simple_server import WSGIServer

import structlog
from opentelemetry._logs import Logger, LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, Tracer, set_span_in_context
from prometheus_client import CollectorRegistry, start_http_server

from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_service.settings import Settings
from draftwood_service.telemetry.base import Telemetry, WatchedServer
from draftwood_service.telemetry.metrics import Metrics, VllmNames
from draftwood_service.telemetry.observed import Observed
from draftwood_service.telemetry.traces import WatchedCall
from draftwood_tenants.resources.follower import end

_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_EXPORTERS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
"""Names of entry points of OpenTelemetry, by protocol."""

_log = structlog.get_logger(__name__)
_OTEL_LOGGER = logging.getLogger("opentelemetry")
_LOG_INTERVAL_SECONDS = 60.0
_SEVERITIES = {
    logging.DEBUG: SeverityNumber.DEBUG,
    logging.INFO: SeverityNumber.INFO,
    logging.WARNING: SeverityNumber.WARN,
    logging.ERROR: SeverityNumber.ERROR,
    logging.CRITICAL: SeverityNumber.FATAL,
}
_NOT_ATTRIBUTES = frozenset({"event", "level", "timestamp", "exc_info", "trace_id", "span_id", "_record"})
_LAG_SAMPLE_SECONDS = 0.1
"""Between two samples."""
_LAG_WINDOW_SECONDS = 10.0
"""Longer than most intervals of collection."""
_CLOSE_SECONDS = 1.0


def exporter_of(signal: str, collector: str) -> Any:
    """An exporter; None for a signal that is switched off. Of `OTEL_TRACES_EXPORTER` and the like, "none" is heeded.

    Args:
        signal: "metrics", "traces" or "logs".
        collector: URL of a collector; "" for none.

    Raises:
        InvalidValueError: the protocol does not exist.
    """
    protocol = os.environ.get(_PROTOCOL) or "grpc"
    if protocol not in _EXPORTERS:
        raise InvalidValueError(_PROTOCOL, protocol, f"it must be one of {', '.join(_EXPORTERS)}")
    if not collector or os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").lower() == "none":
        return None
    [entry_point] = entry_points(group=f"opentelemetry_{signal}_exporter", name=_EXPORTERS[protocol])
    if protocol == "grpc":
        return entry_point.load()(endpoint=collector, insecure=not collector.startswith("https://"))
    return entry_point.load()(endpoint=f"{collector.rstrip('/')}/v1/{signal}")


class OtlpHandler(logging.Handler):
    """Sends log lines with their fields, trace and span."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = dict(record.msg) if isinstance(record.msg, dict) else {"event": record.getMessage()}
        error = fields.get("exc_info") or (record.exc_info and record.exc_info[1])
        trace, span = fields.get("trace_id"), fields.get("span_id")
        attributes = {key: _plain(value) for key, value in fields.items() if key not in _NOT_ATTRIBUTES}
        made = LogRecord(
            timestamp=round(1e9 * record.created),
            context=_context(int(trace, 16), int(span, 16)) if trace and span else None,
            severity_text=record.levelname,
            severity_number=_SEVERITIES.get(record.levelno, SeverityNumber.INFO),
            body=str(fields["event"]),
            attributes={"logger.name": record.name, **attributes},
            exception=error if isinstance(error, BaseException) else None,
        )
        self._logger.emit(made)


class ExporterLogHandler(logging.Handler):
    """Logs at most one line a minute of the failed deliveries that OpenTelemetry reports, until it is closed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        _OTEL_LOGGER.propagate = False
        _OTEL_LOGGER.addHandler(self)
        self._next = 0.0
        self._unlogged = 0

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() < self._next:
            self._unlogged += 1
            return
        self._next = time.monotonic() + _LOG_INTERVAL_SECONDS
        _log.warning("telemetry is not delivered", why=record.getMessage(), unlogged_before=self._unlogged)
        self._unlogged = 0

    def close(self) -> None:
        _OTEL_LOGGER.propagate = True
        _OTEL_LOGGER.removeHandler(self)
        super().close()


def _context(trace: int, span: int) -> Context:
    return set_span_in_context(NonRecordingSpan(SpanContext(trace, span, is_remote=False)))


def _plain(value: object) -> str | bool | int | float:
    return value if isinstance(value, str | bool | int | float) else str(value)


class LoopLag:
    """Wakes up at intervals and keeps by how much it was late. For the event loop, except `longest`."""

    def __init__(self) -> None:
        self._delays: deque[float] = deque(maxlen=round(_LAG_WINDOW_SECONDS / _LAG_SAMPLE_SECONDS))
        self._task = asyncio.get_running_loop().create_task(self._run())

    def longest(self) -> float:
        """Seconds, over the last 10 s. From any thread."""
        return max([*self._delays], default=0.0)

    async def close(self) -> None:
        await end([self._task])

    async def _run(self) -> None:
        while True:
            due = time.perf_counter() + _LAG_SAMPLE_SECONDS
            await asyncio.sleep(_LAG_SAMPLE_SECONDS)
            self._delays.append(max(time.perf_counter() - due, 0.0))


class OpenTelemetry(Telemetry):
    """Records by OpenTelemetry: to a collector, for Prometheus, or both.

    Args:
        collector: URL of a collector; "" for none.

    Attributes:
        metrics_port: where Prometheus collects; None if it does not.

    Raises:
        InvalidInputError: the port of metrics cannot be listened on.
        InvalidValueError: the protocol to the collector does not exist.
    """

    def __init__(self, settings: Settings, collector: str) -> None:
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME") or "draftwood",
                "service.version": version("draftwood"),
                "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            }
        )
        self._tenants = frozenset(settings.metrics_tenants)
        self._exporter_logs = ExporterLogHandler()
        self._closing: list[Callable[[], object]] = []
        self._lag: LoopLag | None = None
        self._registry: CollectorRegistry | None = None
        self._vllm_names = settings.metrics_vllm_names
        self.metrics_port: int | None = None
        try:
            meters = MeterProvider(self._readers(settings, collector), resource, shutdown_on_exit=False)
            self._closing.append(meters.shutdown)
            self._metrics = Metrics(meters.get_meter("draftwood"), self._tenants)
            self._tracer = self._opened_tracer(collector, resource, settings.trace_share)
            self._handler = self._opened_logs(collector, resource)
        except BaseException:
            for close in self._closing:
                close()
            self._exporter_logs.close()
            raise

    def call(self, method: str, metadata: Iterable[tuple[str, Any]] | None, arrived_at: float) -> WatchedCall:
        return WatchedCall(self._metrics, self._tracer, method, metadata, arrived_at)

    def watch(self, server: WatchedServer) -> None:
        self._metrics.model = server.model.name
        self._metrics.engine = server.model.abilities.engine
        self._lag = LoopLag()
        observed = Observed(server, self._tenants, self._lag.longest)
        self._metrics.observe(observed)
        if self._vllm_names and self._registry is not None:
            self._registry.register(VllmNames(observed, server.model.name))

    async def close(self) -> None:
        if self._lag is not None:
            await self._lag.close()
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
        # On threads of their own: an exporter whose collector does not answer waits for as long as it likes.
        threads = [threading.Thread(target=close, daemon=True) for close in self._closing]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            await asyncio.to_thread(thread.join, max(deadline - time.monotonic(), 0.0))
        self._exporter_logs.close()

    def _readers(self, settings: Settings, collector: str) -> list[MetricReader]:
        readers: list[MetricReader] = []
        if settings.metrics_port is not None:
            self._registry = registry = CollectorRegistry()
            readers.append(PrometheusMetricReader(registry=registry, scope_info_enabled=False))
            host = settings.metrics_host or settings.host
            try:
                server, _ = start_http_server(settings.metrics_port, host, registry)
            except OSError as error:
                problem = f"cannot listen on {host}:{settings.metrics_port}: {str(error.strerror).lower()}"
                raise InvalidInputError("metrics_port", settings.metrics_port, problem) from error
            self.metrics_port = server.server_port
            self._closing.append(partial(_stop, server))
            _log.info("metrics", address=f"http://{host}:{self.metrics_port}/metrics")
        if (exporter := exporter_of("metrics", collector)) is not None:
            readers.append(PeriodicExportingMetricReader(exporter))
        return readers

    def _opened_tracer(self, collector: str, resource: Resource, share: float) -> Tracer | None:
        if (exporter := exporter_of("traces", collector)) is None:
            return None
        provider = TracerProvider(ParentBased(TraceIdRatioBased(share)), resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._closing.append(provider.shutdown)
        return provider.get_tracer("draftwood")

    def _opened_logs(self, collector: str, resource: Resource) -> OtlpHandler | None:
        if (exporter := exporter_of("logs", collector)) is None:
            return None
        provider = LoggerProvider(resource, shutdown_on_exit=False)
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        self._closing.append(provider.shutdown)
        handler = OtlpHandler(provider.get_logger("draftwood"))
        logging.getLogger().addHandler(handler)
        return handler


def _stop(server: WSGIServer) -> None:
    server.shutdown()
    server.server_close()
