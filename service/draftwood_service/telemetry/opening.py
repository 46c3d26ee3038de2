"""Opens what the settings and OpenTelemetry's own variables switch on."""

from __future__ import annotations

import os

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.settings import Settings
from draftwood_service.starting import is_url, needs_extra
from draftwood_service.telemetry.base import NO_TELEMETRY, Telemetry

_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def opened_telemetry(settings: Settings) -> Telemetry:
    """Telemetry as the settings ask for it; nothing is imported for it if they do not.

    Raises:
        MissingExtraError: the packages of the extra `telemetry` are not installed.
        InvalidInputError: the port of metrics cannot be listened on, or the collector's address is no URL.
        InvalidValueError: OTEL_EXPORTER_OTLP_PROTOCOL is not one that is served.
    """
    collector = settings.otlp_endpoint or os.environ.get(_VARIABLE)
    if settings.metrics_port is None and not collector:
        return NO_TELEMETRY
    if collector and not is_url(collector):
        raise InvalidInputError(_VARIABLE, collector, "must look like http://HOST:PORT or https://HOST:PORT")
    option = "--otlp-endpoint" if settings.metrics_port is None else "--metrics-port"
    with needs_extra("telemetry", option, ("opentelemetry", "prometheus_client")):
        from draftwood_service.telemetry.open_telemetry import OpenTelemetry

        return OpenTelemetry(settings, collector or "")
