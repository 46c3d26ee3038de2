"""Metrics, traces and logs by OpenTelemetry: only this package imports it, and only where something is switched on."""

from draftwood_service.telemetry.base import NO_TELEMETRY, CallRecord, RequestRecord, Telemetry
from draftwood_service.telemetry.opening import opened_telemetry

__all__ = ["NO_TELEMETRY", "CallRecord", "RequestRecord", "Telemetry", "opened_telemetry"]
