"""Log lines over OTLP, beside those on standard error; and what OpenTelemetry itself logs, at most once a minute."""

from __future__ import annotations

import logging
import time
from typing import Any

import structlog
from opentelemetry._logs import Logger, LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

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
