"""Spans: a call, the request in it, and the parts of the request's time. They contain no text of prompt or answer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import structlog
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from draftwood_service.telemetry import names
from draftwood_service.telemetry.base import CallRecord, RequestRecord
from draftwood_service.telemetry.metrics import Metrics

_PROPAGATOR = TraceContextTextMapPropagator()
_HEADERS = ("traceparent", "tracestate")
_SERVERS_FAULT = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that make the span of a server an error, by the conventions."""


class WatchedCall(CallRecord):
    """A `CallRecord`: its time, its span within the caller's trace, and the requests in it.

    Log lines of the call name the trace from its beginning.

    Args:
        tracer: None where nothing is traced.
    """

    def __init__(
        self,
        metrics: Metrics,
        tracer: Tracer | None,
        method: str,
        metadata: Iterable[tuple[str, Any]] | None,
        arrived_at: float,
    ) -> None:
        self._metrics = metrics
        self._method = method
        self._arrived_at = arrived_at
        self._clock = _Clock()
        self._span: Span = INVALID_SPAN
        if tracer is None:
            return
        self._tracer = tracer
        carrier = {key: value for key, value in metadata or () if key in _HEADERS and isinstance(value, str)}
        attributes = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}
        self._span = tracer.start_span(
            method, _PROPAGATOR.extract(carrier), SpanKind.SERVER, attributes, start_time=self._clock.at(arrived_at)
        )
        if self._span.is_recording() or carrier:
            context = self._span.get_span_context()
            structlog.contextvars.bind_contextvars(
                trace_id=f"{context.trace_id:032x}", span_id=f"{context.span_id:016x}"
            )

    def request(self, record: RequestRecord) -> None:
        self._metrics.request(record)
        if not self._span.is_recording():
            return
        attributes = self._metrics.attributes(record)
        at, stats, ended = self._clock.at, record.stats, time.perf_counter()
        name = f"{record.operation} {attributes[names.MODEL]}"
        span = self._tracer.start_span(
            name,
            set_span_in_context(self._span),
            attributes={**attributes, names.TENANT: record.tenant},
            start_time=at(ended - record.seconds),
        )
        if record.request is not None:
            span.set_attribute(names.RESPONSE_ID, record.request.request_id)
            span.set_attribute(names.INPUT_TOKENS, int(record.request.prompt.size))
            span.set_attribute(names.OUTPUT_TOKENS, record.output_tokens)
            span.set_attribute(names.CACHED_TOKENS, stats.cached_prompt_tokens)
        if record.finish_reasons:
            span.set_attribute(names.FINISH_REASONS, [*record.finish_reasons])
        if stats.decode_steps:
            span.set_attribute(names.ACCEPTANCE_LENGTH, record.output_tokens / stats.decode_steps)
        if record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        times = (stats.arrived_at, stats.first_scheduled_at, stats.first_token_at, stats.finished_at or ended)
        for part, start, end in zip(("queue", "prefill", "decode"), times, times[1:], strict=False):
            if start:
                child = self._tracer.start_span(part, set_span_in_context(span), start_time=at(start))
                child.end(at(end or ended))
            if not end:
                break
        span.end(at(ended))

    def end(self, code: str) -> None:
        self._metrics.call(self._method, code, time.perf_counter() - self._arrived_at)
        self._span.set_attribute(names.RPC_STATUS, code)
        if code != "OK":
            self._span.set_attribute(names.ERROR_TYPE, code)
        if code in _SERVERS_FAULT:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._clock.at(time.perf_counter()))


class _Clock:
    """Times of `time.perf_counter` as nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.perf_counter_ns()

    def at(self, seconds: float) -> int:
        return round(1e9 * seconds) + self._offset
