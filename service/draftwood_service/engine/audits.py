"""Chooses answers to audit, and decodes them again while the engine has nothing else to do. On the engine's thread."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import structlog

from draftwood_memory import MemoryName
from draftwood_model_runner.output import Answer, Difference, Finish, FinishReason
from draftwood_model_runner.request import Request
from draftwood_model_runner.sequence import Grammar, Sequence
from draftwood_service.engine.loaded import LoadedEngine, Redecoding, StepEngine

_log = structlog.get_logger(__name__)

MAX_ANSWERS, MAX_TOKENS = 1024, 1 << 20
"""Answers that wait, and their tokens with those of their prompts: 4 MiB, and hours of decoding."""


class _SelectedSequence(NamedTuple):
    """A running sequence whose answer will be audited, if drafts are verified in it and it ends by itself.

    Attributes:
        grammar: of its format, at the beginning.
        is_kept: the tenant's memory was not purged since.
    """

    grammar: Grammar | None
    is_kept: Callable[[], bool]


class _QueuedAudit(NamedTuple):
    answer: Answer
    is_kept: Callable[[], bool]


class Auditor:
    """The audits of one engine, one at a time and the oldest first.

    Requests are selected by chance and not by their id, which the caller chooses.

    Args:
        report: takes each result.
    """

    def __init__(self, report: Callable[[AuditResult], None]) -> None:
        self._report = report
        self._selected: dict[Sequence, _SelectedSequence] = {}
        self._queue: deque[_QueuedAudit] = deque()
        self._tokens = 0
        self._current: Redecoding | None = None

    @property
    def has_work(self) -> bool:
        """There is a step to make now."""
        return bool(self._queue) and not (self._current is not None and self._current.waits)

    def begin(self, loaded: LoadedEngine, sequences: SequenceOf[Sequence]) -> None:
        """Decides by chance whether to audit a request whose samples are about to run."""
        if random.random() >= loaded.audit_share:
            return
        for sequence in sequences:
            request = sequence.request
            if (request.drafting.max_nodes == 0 and request.format is None) or not loaded.can_audit(request):
                continue  # nothing is drafted, or nothing can be compared
            try:
                grammar = None if sequence.grammar is None else sequence.grammar.copy()
                is_kept = loaded.memory.purge_watch(MemoryName(request.tenant, request.arm))
            except Exception:
                _log.exception("audit failed", request_id=request.request_id)
                self._report(AuditResult.of(request, AuditOutcome.FAILED))
                continue
            self._selected[sequence] = _SelectedSequence(grammar, is_kept)

    def end(self, sequence: Sequence, finish: Finish | None) -> None:
        """Queues the answer of a sequence that has ended, if it was selected; None if it was cancelled."""
        selected = self._selected.pop(sequence, None)
        by_itself = finish is not None and finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if selected is None or not by_itself or not sequence.stats.draft_tokens:
            return
        assert finish is not None
        answer = Answer(sequence.request, tuple(sequence.output), finish, selected.grammar)
        if len(self._queue) == MAX_ANSWERS or self._tokens + answer.tokens > MAX_TOKENS:
            self._report(AuditResult.of(answer.request, AuditOutcome.DROPPED))
            return
        self._queue.append(_QueuedAudit(answer, selected.is_kept))
        self._tokens += answer.tokens

    def purge(self, tenant: str) -> None:
        """Drops all audits of a tenant."""
        for sequence in [chosen for chosen in self._selected if chosen.request.tenant == tenant]:
            del self._selected[sequence]
            self._report(AuditResult.of(sequence.request, AuditOutcome.DROPPED))
        for queued in [waiting for waiting in self._queue if waiting.answer.request.tenant == tenant]:
            self._remove(queued, AuditOutcome.DROPPED)

    def step(self, engine: StepEngine) -> None:
        """One forward pass of the oldest audit. Only while the engine has no work."""
        queued = self._queue[0]
        try:
            is_kept = queued.is_kept()
            if is_kept:
                self._current = self._current or engine.redecode(queued.answer)
                self._current.step()
        except Exception:
            _log.exception("audit failed", request_id=queued.answer.request.request_id)
            self._remove(queued, AuditOutcome.FAILED)
            return
        if not is_kept:
            self._remove(queued, AuditOutcome.DROPPED)
        elif self._current is not None and self._current.done:
            difference = self._current.difference
            compared = len(queued.answer.output) if difference is None else difference.position
            outcome = AuditOutcome.SAME if difference is None else AuditOutcome.DIFFERENT
            self._remove(queued, outcome, compared, difference)

    def _remove(
        self, queued: _QueuedAudit, outcome: AuditOutcome, tokens: int = 0, difference: Difference | None = None
    ) -> None:
        current = self._current if queued is self._queue[0] else None
        self._queue.remove(queued)
        self._tokens -= queued.answer.tokens
        if current is not None:
            self._current = None
            try:
                current.close()
            except Exception:
                _log.exception("audit failed", request_id=queued.answer.request.request_id)
                outcome, tokens, difference = AuditOutcome.FAILED, 0, None
        self._report(AuditResult.of(queued.answer.request, outcome, tokens, difference))


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
        names = request.tenant, request.request_id, request.drafting.strategy, request.arm
        return cls(outcome, *names, tokens, difference)
