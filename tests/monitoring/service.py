"""A real service with the bundled model that has had a few requests, and its page of metrics."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from draftwood_benchmarks.harness.servers import server_process
from draftwood_client import Client, InvalidRequestError

QUESTIONS = ("Where is my parcel?", "Can I return my order?", "Where is my order?")


class Watched(NamedTuple):
    """A running service, and where Prometheus collects its metrics."""

    target: str
    metrics: str

    def page(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def ask(self, tenant: str) -> None:
        """A few requests, one of them invalid."""
        with Client(self.target, tenant=tenant, timeout=60) as client:
            for question in QUESTIONS:
                client.generate([{"role": "user", "content": question}], max_tokens=40)
            with suppress(InvalidRequestError):
                client.generate("x", max_tokens=10_000_000)

    def audited(self) -> str:
        """The page once an answer has been audited, and its figures are reported."""
        end = time.monotonic() + 100
        while "draftwood_audit_largest_margin{" not in (page := self.page()) or "accepted_by_depth_total{" not in page:
            assert time.monotonic() < end, page
            time.sleep(0.2)
        return page


@contextmanager
def watched_service() -> Iterator[Watched]:
    """Serves while the context lasts."""
    flags = ("--metrics-port", "0", "--metrics-tenants", "acme", "--audit-share", "1", "--threads", "1")
    with server_process(*flags, "--log-level", "info") as server:
        [address] = re.findall(r"http://([\d.:]+)/metrics", server.log.read_text(encoding="utf-8"))
        watched = Watched(server.target, address)
        for tenant in ("acme", "globex"):
            watched.ask(tenant)
        yield watched
