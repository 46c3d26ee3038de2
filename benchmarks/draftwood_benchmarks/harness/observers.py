"""What watches a service in production, for a benchmark of what that costs: a collector and a scraper."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from draftwood_benchmarks.harness.report import BenchmarkError

_SCRAPE_SECONDS = 5.0
_FIRST_SECONDS = 0.5
"""Between attempts until the service listens."""


@contextmanager
def observed() -> Iterator[tuple[str, ...]]:
    """Runs an OTLP collector that takes everything, and scrapes metrics every few seconds.

    Yields the flags of `draftwood serve` with which a service is watched by both.

    Raises:
        BenchmarkError: at the end, if metrics were never collected.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    stopping, sizes = threading.Event(), list[int]()
    scraper = threading.Thread(target=_scrape, args=(f"http://127.0.0.1:{port}/metrics", stopping, sizes), daemon=True)
    with _collector() as endpoint:
        scraper.start()
        flags = ("--metrics-port", str(port), "--otlp-endpoint", endpoint, "--trace-share", "1")
        try:
            yield (*flags, "--log-level", "info", "--log-format", "json")
        finally:
            stopping.set()
            scraper.join()
    if not sizes:
        raise BenchmarkError("metrics were never collected")


def _scrape(url: str, stopping: threading.Event, sizes: list[int]) -> None:
    while not stopping.wait(_SCRAPE_SECONDS if sizes else _FIRST_SECONDS):
        try:
            with urllib.request.urlopen(url, timeout=10) as page:
                sizes.append(len(page.read()))
        except urllib.error.URLError:  # before the service listens, and when it has ended
            continue


class _Everything(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


@contextmanager
def _collector() -> Iterator[str]:
    """Yields its URL."""
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((_Everything(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
