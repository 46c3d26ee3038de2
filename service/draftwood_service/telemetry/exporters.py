"""Exporters over OTLP: by gRPC or HTTP, as OpenTelemetry's own variables say."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

from draftwood_model_runner.errors import InvalidValueError

_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_EXPORTERS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
"""Names of entry points of OpenTelemetry, by protocol."""


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
    [found] = entry_points(group=f"opentelemetry_{signal}_exporter", name=_EXPORTERS[protocol])
    if protocol == "grpc":
        return found.load()(endpoint=collector, insecure=not collector.startswith("https://"))
    return found.load()(endpoint=f"{collector.rstrip('/')}/v1/{signal}")
