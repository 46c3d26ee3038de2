"""The interface of telemetry, and its no-op implementation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from draftwood_model_runner.request import Request
    from draftwood_model_runner.sequence import SequenceStats
    from draftwood_service.audit_counts import AuditRecorder
    from draftwood_service.engine.bridge import EngineBridge
    from draftwood_service.engine.recovery import EngineRecovery
    from draftwood_service.quotas import Limiter
    from draftwood_service.rpc.access import Gate
    from draftwood_service.serving import ServedModel


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended.

    Attributes:
        operation: chat or text_completion.
        error: reason of the error that it ended with, or "cancelled"; "" for none.
        request: its first sample; None if it was refused before it was read.
        stats: over all samples.
        output_tokens: of all samples.
        finish_reasons: of the samples that ended.
        seconds: from its arrival to its end.
    """

    tenant: str
    operation: str
    error: str
    request: Request | None
    stats: SequenceStats
    output_tokens: int
    finish_reasons: Sequence[str]
    seconds: float


class WatchedServer(Protocol):
    """`draftwood_service.rpc.server.RunningServer`, as far as metrics read it."""

    model: ServedModel
    serving: bool
    slots: int
    bridge: EngineBridge
    recovery: EngineRecovery
    limiter: Limiter
    audits: AuditRecorder
    gate: Gate


class CallRecord:
    """An RPC, from its arrival to its end. This one records nothing."""

    def request(self, record: RequestRecord) -> None:
        """A request of the call has ended."""

    def end(self, code: str) -> None:
        """The call has ended with a gRPC status."""


class Telemetry:
    """Records calls and requests. All methods are for the event loop. This one records nothing."""

    def call(self, method: str, metadata: Iterable[tuple[str, Any]] | None, arrived_at: float) -> CallRecord:
        """A call has arrived.

        Args:
            method: with its service, such as "draftwood.v1.GenerationService/Generate".
            metadata: of the caller, with the trace that the call is a part of.
            arrived_at: on the clock of `time.perf_counter`.
        """
        return _NO_CALL

    def watch(self, server: WatchedServer) -> None:
        """Reads the server's counters from now on."""

    async def close(self) -> None:
        """Sends what is left, for a second at most."""


_NO_CALL = CallRecord()
NO_TELEMETRY = Telemetry()
