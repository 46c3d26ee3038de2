"""One log line for each request, when it ends, and for each change of memories. They never contain text of prompt or
answer."""

from __future__ import annotations

import time
from types import TracebackType

import structlog

from draftwood_model_runner.statistics import SequenceStats
from draftwood_service.engine.stream import Sample
from draftwood_service.errors import rule_for
from draftwood_service.rpc.calls import Call
from draftwood_service.telemetry import RequestRecord

_log = structlog.get_logger("draftwood.requests")
_audit = structlog.get_logger("draftwood.audit")


class RequestLog:
    """Context manager around a request.

    Attributes:
        samples: set once the request is read.
        outcome: the finish reason, if it is set; an exception's reason replaces it.
        finish_reasons: of the samples; empty until all have ended.
    """

    def __init__(self, call: Call, tenant: str, operation: str) -> None:
        self._call = call
        self._tenant = tenant
        self._operation = operation
        self.finish_reasons: list[str] = []
        self.samples: list[Sample] = []
        self.outcome = "cancelled"

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.outcome = rule_for(error).reason.lower()
        fields: dict[str, object] = {
            "request_id": self._call.request_id,
            "principal": self._call.principal.name,
            "tenant": self._tenant,
            "outcome": self.outcome,
        }
        if self.samples:
            fields |= _measurements(self.samples)
        seconds = time.perf_counter() - self._call.arrived_at
        _log.info("request", **fields, total_ms=_milliseconds(seconds))
        self._call.record.request(self._record(seconds, error is not None))

    def _record(self, seconds: float, failed: bool) -> RequestRecord:
        parts = [sample.stats for sample in self.samples]
        return RequestRecord(
            tenant=self._tenant,
            operation=self._operation,
            error=self.outcome if failed else "",
            request=self.samples[0].request if self.samples else None,
            stats=SequenceStats.over(parts) if parts else SequenceStats(),
            output_tokens=sum(sample.completion_tokens for sample in self.samples),
            finish_reasons=self.finish_reasons,
            seconds=seconds,
        )


class AuditLog:
    """Context manager around an operator's call: one line with who did what to which tenant's memory, and its result.

    Attributes:
        tenant: set once it is read; None for a call about several.
        records: exported or imported so far, or texts that the memory was warmed with.
        memories, tokens: purged; None otherwise.
    """

    def __init__(self, action: str, call: Call, tenant: str | None = None) -> None:
        self._action = action
        self._call = call
        self.tenant = tenant
        self.records = 0
        self.memories: int | None = None
        self.tokens: int | None = None

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        result = "ok" if error is None else "cancelled"
        if isinstance(error, Exception):
            result = rule_for(error).reason.lower()
        done = (
            {"memories": self.memories, "tokens": self.tokens}
            if self.memories is not None
            else {"records": self.records}
        )
        names = self._call.context.auth_context().get("x509_common_name", [])
        _audit.info(
            "memory",
            action=self._action,
            tenant=self.tenant,
            principal=self._call.principal.name,
            role=self._call.principal.role.label,
            peer=self._call.context.peer(),
            certificate=b",".join(names).decode(errors="replace") or None,
            request_id=self._call.request_id,
            result=result,
            **done,
        )


def _measurements(samples: list[Sample]) -> dict[str, object]:
    request, stats = samples[0].request, SequenceStats.over([sample.stats for sample in samples])
    written = sum(sample.completion_tokens for sample in samples)
    measured: dict[str, object] = {
        "strategy": request.strategy_name,
        "prompt_tokens": request.prompt.size,
        "completion_tokens": written,
        "acceptance_length": round(written / max(stats.decode_steps, 1), 3),
    }
    if request.arm:
        measured["arm"] = request.arm
    if len(samples) > 1:
        measured["samples"] = len(samples)
    if stats.first_scheduled_at:
        measured["queue_ms"] = _milliseconds(stats.first_scheduled_at - stats.arrived_at)
    if stats.first_token_at:
        measured["prefill_ms"] = _milliseconds(stats.first_token_at - stats.first_scheduled_at)
    if stats.finished_at and stats.first_token_at:
        measured["decode_ms"] = _milliseconds(stats.finished_at - stats.first_token_at)
    if stats.pauses:
        measured["pauses"] = stats.pauses
    if stats.drafting_disabled_reason:
        measured["drafting_disabled"] = stats.drafting_disabled_reason
    return measured


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 2)
