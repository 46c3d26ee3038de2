"""Exporters over OTLP: by gRPC or HTTP, as OpenTelemetry's own variables say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from draftwood_model_runner.errors import InvalidValueError

_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_PACKAGES = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}
_EXPORTERS = {
    "metrics": ("metric_exporter", "OTLPMetricExporter"),
    "traces": ("trace_exporter", "OTLPSpanExporter"),
    "logs": ("_log_exporter", "OTLPLogExporter"),
}
"""By signal, module and class in each of the packages."""


def exporter_of(signal: str, collector: str, environ: Mapping[str, str] = os.environ) -> Any:
    """An exporter; None for a signal that is switched off.

    Args:
        signal: a key of `_EXPORTERS`.
        collector: URL of a collector; "" for none.
        environ: with `OTEL_TRACES_EXPORTER` and the like, of which only "none" is heeded.

    Raises:
        InvalidValueError: the protocol does not exist.
    """
    protocol = environ.get(_PROTOCOL) or "grpc"
    if protocol not in _PACKAGES:
        raise InvalidValueError(_PROTOCOL, protocol, f"it must be one of {', '.join(_PACKAGES)}")
    if not collector or environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").lower() == "none":
        return None
    module, name = _EXPORTERS[signal]
    make = getattr(import_module(f"{_PACKAGES[protocol]}.{module}"), name)
    if protocol == "grpc":
        return make(endpoint=collector, insecure=not collector.startswith("https://"))
    return make(endpoint=f"{collector.rstrip('/')}/v1/{signal}")
