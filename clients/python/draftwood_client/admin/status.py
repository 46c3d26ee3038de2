"""The client of a server's status: what it does now, once or as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from draftwood.admin.v1 import status_pb2 as pb
from draftwood.admin.v1.status_pb2_grpc import StatusServiceStub
from draftwood_client.admin.calls import Calls, ConnectionArguments, connect
from draftwood_client.connection import DEFAULT_TARGET

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """The requests of one tenant; fields as in the protocol."""

    tenant: str
    running: int
    waiting: int
    tokens: int
    decode_steps: int
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class DraftingStatus:
    """The requests of one strategy in one arm; fields as in the protocol, times in seconds."""

    strategy: str
    arm: str
    requests: int
    tokens: int
    decode_steps: int
    draft_tokens: int
    accepted_tokens: int
    draft_time: float
    disabled: int


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The draft tokens of one source; fields as in the protocol."""

    source: str
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store of learned memories; fields as in the protocol, times in seconds."""

    up: bool
    lag: float
    pending_records: int
    dropped_records: int
    late_memories: int
    memories: int
    memory_tokens: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class AuditStatus:
    """Totals of the losslessness audit; fields as in the protocol."""

    audited: int
    differing: int
    ties: int


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """The load of a server; fields as in the protocol, times in seconds."""

    running: int
    waiting: int
    max_running: int
    max_waiting: int
    kv_pages_used: int
    kv_pages_cached: int
    kv_pages: int
    steps: int
    busy: float
    prompt_tokens: int
    cached_prompt_tokens: int
    tokens: int
    decode_steps: int
    preemptions: int
    engine_restarts: int
    draft_tokens: int
    drafting: tuple[DraftingStatus, ...]
    sources: tuple[SourceStatus, ...]
    accepted_by_depth: tuple[int, ...]
    store: StoreStatus
    audits: AuditStatus


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One sample; fields as in the protocol, times in seconds.

    Attributes:
        state: "serving", "restarting", "draining" or "configuration_unknown".
        load: None unless the caller is an operator.
    """

    time: datetime
    uptime: float
    server_version: str
    model: str
    dtype: str
    runner: str
    state: str
    tenants: tuple[TenantStatus, ...]
    load: LoadStatus | None


class StatusClient:
    """A connection to a server's status service. Constructor arguments as for `Client`, without `retry`.

    with StatusClient("localhost:50051", api_key=key) as client:
        for status in client.watch():
            print(status.state)
    """

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

    def status(self) -> ServerStatus:
        """One sample. Raises `StatusError`."""
        stub = StatusServiceStub(self._calls.channel)
        return _status(self._calls.ask(stub.GetStatus, pb.GetStatusRequest()).status)

    def watch(self, interval: float = 1.0) -> Iterator[ServerStatus]:
        """A sample at once and one each `interval` seconds, 0.5 to 60. Raises `StatusError`."""
        request = pb.WatchStatusRequest()
        request.interval.FromNanoseconds(round(interval * 1e9))
        stub = StatusServiceStub(self._calls.channel)
        for response in self._calls.stream(stub.WatchStatus, request):
            yield _status(response.status)


def _status(message: pb.ServerStatus) -> ServerStatus:
    return _made(
        ServerStatus,
        message,
        time=message.time.ToDatetime(UTC),
        state=pb.ServingState.Name(message.state).removeprefix("SERVING_STATE_").lower(),
        tenants=tuple(_made(TenantStatus, one) for one in message.tenants),
        load=_load(message.load) if message.HasField("load") else None,
    )


def _load(message: pb.LoadStatus) -> LoadStatus:
    return _made(
        LoadStatus,
        message,
        drafting=tuple(_made(DraftingStatus, one) for one in message.drafting),
        sources=tuple(_made(SourceStatus, one) for one in message.sources),
        accepted_by_depth=tuple(message.accepted_by_depth),
        store=_made(StoreStatus, message.store),
        audits=_made(AuditStatus, message.audits),
    )


def _made(kind: type[_Kind], message: Message, **values: Any) -> _Kind:
    """A dataclass with the message's fields of the same names, but for those in `values`; durations in seconds."""
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in values:
            value = getattr(message, field.name)
            values[field.name] = value.ToNanoseconds() / 1e9 if isinstance(value, Duration) else value
    return kind(**values)
