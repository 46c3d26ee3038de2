"""What becomes of each request when it ends: a log line, telemetry, and its count in an experiment; and the audit log,
one line for each change that an operator makes. No line contains text of prompt or answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from draftwood_model_runner.sequence import SequenceStats
from draftwood_service.engine.stream import Sample
from draftwood_service.experiments.live import outcome_of
from draftwood_service.rpc.calls import Call
from draftwood_service.rpc.statuses import rule_for
from draftwood_service.telemetry import RequestRecord
from draftwood_tenants.experiments.arms import ArmAssignment, Counting

_log = structlog.get_logger("draftwood.requests")
_audit = structlog.get_logger("draftwood.audit")


@dataclass(eq=False, slots=True)
class RequestLog:
    """What is known of a request.

    Attributes:
        assignment: its arm; None for a request in no experiment.
        samples: set once the request is read.
        finish_reasons: of the samples; empty until all have ended.
        outcome: the finish reason, if it is set; an exception's reason replaces it.
    """

    call: Call
    tenant: str
    operation: str
    counting: Counting
    assignment: ArmAssignment | None = None
    samples: list[Sample] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    outcome: str = "cancelled"

    @contextmanager
    def until_end(self) -> Iterator[RequestLog]:
        """Around the request."""
        failed = True
        try:
            yield self
            failed = False
        except Exception as error:
            self.outcome = rule_for(error).reason.lower()
            raise
        finally:
            self._ended(failed)

    def _ended(self, failed: bool) -> None:
        samples = self.samples
        record = RequestRecord(
            tenant=self.tenant,
            operation=self.operation,
            error=self.outcome if failed else "",
            request=samples[0].request if samples else None,
            stats=SequenceStats.over([sample.stats for sample in samples]) if samples else SequenceStats(),
            output_tokens=sum(sample.completion_tokens for sample in samples),
            finish_reasons=self.finish_reasons,
            seconds=time.perf_counter() - self.call.arrived_at,
        )
        _log.info(
            "request",
            request_id=self.call.request_id,
            principal=self.call.principal.name,
            tenant=self.tenant,
            outcome=self.outcome,
            **_measurements(record, len(samples)),
            total_ms=_milliseconds(record.seconds),
        )
        self.call.record.request(record)
        if self.assignment is not None:
            counted = outcome_of(self.outcome, samples, self.call.arrived_at)
            if counted is not None:
                self.counting.record(self.assignment, counted)


@contextmanager
def audited(call: Call, event: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Around a change: logs who made it, and its result. The fields, which it gives, may be changed inside."""
    result = "ok"
    try:
        yield fields
    except BaseException as error:
        result = rule_for(error).reason.lower() if isinstance(error, Exception) else "cancelled"
        raise
    finally:
        names = call.context.auth_context().get("x509_common_name", [])
        _audit.info(
            event,
            **fields,
            principal=call.principal.name,
            role=call.principal.role.label,
            peer=call.context.peer(),
            certificate=b",".join(names).decode(errors="replace") or None,
            request_id=call.request_id,
            result=result,
        )


def _measurements(record: RequestRecord, samples: int) -> dict[str, object]:
    """None for a request that was not read."""
    request, stats = record.request, record.stats
    if request is None:
        return {}
    measured: dict[str, object] = {
        "strategy": request.drafting.strategy,
        "prompt_tokens": request.prompt.size,
        "completion_tokens": record.output_tokens,
        "acceptance_length": round(record.output_tokens / max(stats.decode_steps, 1), 3),
    }
    if request.arm:
        measured["arm"] = request.arm
    if samples > 1:
        measured["samples"] = samples
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
    if stats.no_draft:
        measured["no_draft"] = stats.no_draft
    return measured


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 2)
