"""Exporters over OTLP: by gRPC or HTTP, as OpenTelemetry's own variables say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from draftwood_model_runner.errors import InvalidValueError

_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_PACKAGES = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}


@dataclass(frozen=True, slots=True)
class Exporters:
    """Makes an exporter for each kind of signal; None for one that is switched off.

    Attributes:
        endpoint: of the collector; "" for none.
        protocol: a key of `_PACKAGES`.
        environ: with `OTEL_TRACES_EXPORTER` and the like, of which only "none" is heeded.
    """

    endpoint: str
    protocol: str
    environ: Mapping[str, str]

    @classmethod
    def to(cls, endpoint: str, environ: Mapping[str, str] = os.environ) -> Exporters:
        """Raises InvalidValueError for a protocol that does not exist."""
        protocol = environ.get(_PROTOCOL) or "grpc"
        if protocol not in _PACKAGES:
            raise InvalidValueError(_PROTOCOL, protocol, f"it must be one of {', '.join(_PACKAGES)}")
        return cls(endpoint, protocol, environ)

    def metrics(self) -> Any:
        return self._made("metrics", "metric_exporter.OTLPMetricExporter")

    def spans(self) -> Any:
        return self._made("traces", "trace_exporter.OTLPSpanExporter")

    def logs(self) -> Any:
        return self._made("logs", "_log_exporter.OTLPLogExporter")

    def _made(self, signal: str, exporter: str) -> Any:
        off = self.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").lower() == "none"
        if off or not self.endpoint:
            return None
        module, _, name = exporter.rpartition(".")
        make = getattr(import_module(f"{_PACKAGES[self.protocol]}.{module}"), name)
        if self.protocol == "grpc":
            return make(endpoint=self.endpoint, insecure=not self.endpoint.startswith("https://"))
        return make(endpoint=f"{self.endpoint.rstrip('/')}/v1/{signal}")
