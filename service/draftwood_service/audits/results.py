"""Results of audits, sent from the engine's process to the service."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from draftwood_model_runner.answer import Difference
from draftwood_model_runner.request import Request


class AuditOutcome(Enum):
    """How an audit ended; DROPPED: it was not made, FAILED: the model failed in it."""

    SAME = "same"
    DIFFERENT = "different"
    DROPPED = "dropped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The audit of one answer. Contains nothing of its text.

    Attributes:
        tokens: of the answer that were compared.
        difference: set for the outcome DIFFERENT alone.
        at: when, in seconds of `time.time`.
    """

    outcome: AuditOutcome
    tenant: str
    request_id: str
    strategy: str
    arm: str
    tokens: int = 0
    difference: Difference | None = None
    at: float = field(default_factory=time.time)

    @classmethod
    def of(
        cls, request: Request, outcome: AuditOutcome, tokens: int = 0, difference: Difference | None = None
    ) -> AuditResult:
        """The result for an answer to `request`."""
        names = request.tenant, request.request_id, request.strategy_name, request.arm
        return cls(outcome, *names, tokens, difference)
