"""StatusService of a server that follows a script."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from draftwood.admin.v1 import status_pb2 as pb
from draftwood.admin.v1.status_pb2_grpc import StatusServiceServicer, add_StatusServiceServicer_to_server
from tests.client.fake_server import Running

SECONDS = 1_000_000_000


def tenant(name: str, seconds: float, rate: int = 100, running: int = 1, waiting: int = 0) -> pb.TenantStatus:
    """A tenant that has written `rate` tokens a second for so long, 4 a step."""
    tokens = round(rate * seconds)
    return pb.TenantStatus(
        tenant=name,
        running=running,
        waiting=waiting,
        tokens=tokens,
        decode_steps=tokens // 4,
        draft_tokens=5 * tokens,
        accepted_tokens=3 * tokens // 4,
    )


def sample(seconds: float, *tenants: pb.TenantStatus, operator: bool = True) -> pb.ServerStatus:
    """Of a server that has worked for so long, at steady rates."""
    tenants = tenants or (tenant("acme", seconds), tenant("globex", seconds, rate=20))
    about: Any = {"server_version": "1.2.3", "model": "demo", "dtype": "float32", "runner": "torch"}
    status = pb.ServerStatus(**about, state=pb.SERVING_STATE_SERVING, tenants=tenants)
    status.report_time.FromSeconds(1_800_000_000)
    status.uptime.FromNanoseconds(round(seconds * SECONDS))
    if operator:
        status.load.CopyFrom(_load(seconds, tenants))
    return status


def _load(seconds: float, tenants: tuple[pb.TenantStatus, ...]) -> pb.LoadStatus:
    def after(**rates: float) -> Any:
        return {name: round(rate * seconds) for name, rate in rates.items()}

    def total(name: str) -> int:
        return sum(getattr(status, name) for status in tenants)

    drafting = after(tokens=40, decode_steps=10, draft_tokens=200, accepted_tokens=30)
    bounds: Any = {"max_running": 16, "max_waiting": 64, "kv_pages_used": 30, "kv_pages_cached": 20, "kv_pages": 100}
    totals: Any = {name: total(name) for name in ("running", "waiting", "tokens", "draft_tokens")}
    load = pb.LoadStatus(
        **bounds,
        **after(steps=50, prompt_tokens=300, cached_prompt_tokens=100),
        **totals,
        decode_steps=total("tokens") // 4,
        drafting=[pb.DraftingStatus(strategy="hybrid", **drafting)],
        sources=[pb.SourceStatus(source="trie", **after(draft_tokens=100, accepted_tokens=25))],
        accepted_by_depth=[30, 20, 10],
        store=pb.StoreStatus(up=True, pending_records=3, memories=2, memory_tokens=5000, memory_bytes=2**20),
        audits=pb.AuditStatus(audited=40, differing=2, ties=2, failed=0),
    )
    load.busy.FromNanoseconds(round(0.5 * seconds * SECONDS))
    load.drafting[0].draft_duration.FromNanoseconds(round(0.002 * seconds * SECONDS))
    load.store.lag.FromMilliseconds(12)
    return load


class FakeStatus(Running, StatusServiceServicer):
    """A server on port 0. Each call of WatchStatus gets the samples, one after another, and stays open.

    Attributes:
        samples: of the next calls.
        pause: seconds after each sample.
        error: ends each call before its first sample.
        intervals: that callers asked for, in seconds.
    """

    def __init__(
        self, *samples: pb.ServerStatus, pause: float = 0.0, error: tuple[grpc.StatusCode, str] | None = None
    ) -> None:
        self.samples = samples
        self.pause = pause
        self.error = error
        self.intervals: list[float] = []
        self._port = 0
        self._ending = threading.Event()
        self._server = self._new_server()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port}"

    def stop(self) -> None:
        self._ending.set()
        super().stop()

    def restart(self) -> None:
        """On the same port."""
        self._ending.clear()
        self._server = self._new_server()
        self._server.start()

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(status=self.samples[-1])

    def WatchStatus(self, request: pb.WatchStatusRequest, context: Any) -> Iterator[pb.WatchStatusResponse]:
        self.intervals.append(request.interval.ToNanoseconds() / SECONDS)
        if self.error is not None:
            context.abort(*self.error)
        for status in self.samples:
            yield pb.WatchStatusResponse(status=status)
            self._ending.wait(self.pause)
        while context.is_active() and not self._ending.wait(0.05):
            pass

    def _new_server(self) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        add_StatusServiceServicer_to_server(self, server)
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        return server
