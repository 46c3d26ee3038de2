"""OpenTelemetry's providers, exporters and the port for Prometheus."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from typing import Any
from wsgiref.simple_server import WSGIServer

import structlog
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry, start_http_server

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.settings import Settings
from draftwood_service.telemetry.base import Telemetry, WatchedServer
from draftwood_service.telemetry.exporters import exporter_of
from draftwood_service.telemetry.logs import ExporterLogHandler, OtlpHandler
from draftwood_service.telemetry.loop_lag import LoopLag
from draftwood_service.telemetry.metrics import Metrics
from draftwood_service.telemetry.observed import Observed
from draftwood_service.telemetry.traces import WatchedCall
from draftwood_service.telemetry.vllm_names import VllmNames

_log = structlog.get_logger(__name__)

_CLOSE_SECONDS = 1.0


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
