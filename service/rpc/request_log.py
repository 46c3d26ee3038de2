"""One log line for each request, when it ends. Never what it said."""

from __future__ import annotations

import time
from types import TracebackType

import structlog

from model_runner.sequence import Sequence, SequenceStats
from service.errors import rule_for

_log = structlog.get_logger("draftwood.requests")


class RequestLog:
    """Context manager around a request.

    Attributes:
        sequences: one for each sample, set once the request is read.
        outcome: set where it ended well; else the exception says it.
    """

    def __init__(self, request_id: str, tenant: str, arrived_at: float) -> None:
        self._request_id = request_id
        self._tenant = tenant
        self._arrived_at = arrived_at
        self.sequences: list[Sequence] = []
        self.outcome = "cancelled"

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.outcome = rule_for(error).reason.lower()
        fields: dict[str, object] = {"request_id": self._request_id, "tenant": self._tenant, "outcome": self.outcome}
        if self.sequences:
            fields |= _facts(self.sequences)
        _log.info("request", **fields, total_ms=_milliseconds(time.perf_counter() - self._arrived_at))


def _facts(sequences: list[Sequence]) -> dict[str, object]:
    stats = SequenceStats.over([sequence.stats for sequence in sequences])
    written = sum(len(sequence.output) for sequence in sequences)
    facts: dict[str, object] = {
        "strategy": sequences[0].strategy_name,
        "prompt_tokens": sequences[0].prompt.size,
        "completion_tokens": written,
        "acceptance_length": round(written / max(stats.decode_steps, 1), 3),
    }
    if len(sequences) > 1:
        facts["samples"] = len(sequences)
    if stats.first_scheduled_at:
        facts["queue_ms"] = _milliseconds(stats.first_scheduled_at - stats.arrived_at)
    if stats.first_token_at:
        facts["prefill_ms"] = _milliseconds(stats.first_token_at - stats.first_scheduled_at)
    if stats.finished_at and stats.first_token_at:
        facts["decode_ms"] = _milliseconds(stats.finished_at - stats.first_token_at)
    if stats.drafting_disabled_reason:
        facts["drafting_disabled"] = stats.drafting_disabled_reason
    return facts


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 2)
