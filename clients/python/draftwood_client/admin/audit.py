"""The operators' client of the losslessness audit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Self, Unpack

from draftwood.admin.v1 import audit_pb2 as pb
from draftwood.admin.v1.audit_pb2_grpc import AuditServiceStub
from draftwood_client.admin.calls import Calls, ConnectionArguments, connect
from draftwood_client.connection import DEFAULT_TARGET


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """The audits of one strategy in one arm; fields as in the protocol."""

    strategy: str
    arm: str
    audited: int
    tokens: int
    differing: int
    ties: int
    dropped: int
    failed: int
    margins: tuple[int, ...]
    largest_margin: float


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """The first token of an answer that differs; fields as in the protocol."""

    time: datetime
    tenant: str
    request_id: str
    strategy: str
    arm: str
    position: int
    margin: float
    tie: bool


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What the audits of a server found since its start; fields as in the protocol."""

    share: float
    model: str
    dtype: str
    runner: str
    exact: bool
    tie_bound: float
    margin_bounds: tuple[float, ...]
    counts: tuple[AuditCounts, ...]
    differences: tuple[AuditDifference, ...]
    engine_restarts: int


class AuditClient:
    """A connection to a server's audit service. Constructor arguments as for `Client`, without `retry`."""

    def __init__(self, target: str = DEFAULT_TARGET, **arguments: Unpack[ConnectionArguments]) -> None:
        self._calls = Calls(connect(target, arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels requests under way and closes the connection. May be called twice."""
        self._calls.close()

    def report(self) -> AuditReport:
        """What the audits found. Raises `StatusError`."""
        stub = AuditServiceStub(self._calls.channel)
        return _report(self._calls.ask(stub.GetAuditReport, pb.GetAuditReportRequest()))


def _report(message: pb.GetAuditReportResponse) -> AuditReport:
    return AuditReport(
        share=message.share,
        model=message.model,
        dtype=message.dtype,
        runner=message.runner,
        exact=message.exact,
        tie_bound=message.tie_bound,
        margin_bounds=tuple(message.margin_bounds),
        counts=tuple(map(_counts, message.counts)),
        differences=tuple(map(_difference, message.differences)),
        engine_restarts=message.engine_restarts,
    )


def _counts(message: pb.AuditCounts) -> AuditCounts:
    return AuditCounts(
        strategy=message.strategy,
        arm=message.arm,
        audited=message.audited,
        tokens=message.tokens,
        differing=message.differing,
        ties=message.ties,
        dropped=message.dropped,
        failed=message.failed,
        margins=tuple(message.margins),
        largest_margin=message.largest_margin,
    )


def _difference(message: pb.AuditDifference) -> AuditDifference:
    return AuditDifference(
        time=message.time.ToDatetime(UTC),
        tenant=message.tenant,
        request_id=message.request_id,
        strategy=message.strategy,
        arm=message.arm,
        position=message.position,
        margin=message.margin,
        tie=message.tie,
    )
