"""Metrics of a gateway, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """The metrics of a gateway."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("draftwood_gateway_requests", "Requests", ["path", "status"], registry=self._registry)
        self._live = Gauge("draftwood_gateway_requests_live", "Requests under way", registry=self._registry)
        self._last = Gauge(
            "draftwood_gateway_last_request_timestamp_seconds",
            "When the last request arrived, in seconds since 1970; 0 for never",
            registry=self._registry,
        )
        self._seconds = Histogram(
            "draftwood_gateway_request_duration_seconds", "From a request to its end", ["path"], registry=self._registry
        )
        self._ended = Counter(
            "draftwood_gateway_connections_ended",
            "Connections that were ended: late, full (too many), bytes (of incomplete requests)",
            ["reason"],
            registry=self._registry,
        )

    def begin(self, path: str) -> Callable[[int], None]:
        """Counts a request. Returns a function to call with the status at its end; only its first call counts."""
        began, ended = time.perf_counter(), False
        self._live.inc()
        self._last.set_to_current_time()

        def end(status: int) -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._live.dec()
                self._requests.labels(path, str(status)).inc()
                self._seconds.labels(path).observe(time.perf_counter() - began)

        return end

    def connection_ended(self, reason: str) -> None:
        """Counts a connection that the gateway ended."""
        self._ended.labels(reason).inc()

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)
