"""The counts of all audits since the service started, and the latest differences; kept when the engine restarts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass, field

import structlog

from draftwood_model_runner.output import Difference
from draftwood_service.engine.audits import AuditOutcome, AuditResult
from draftwood_service.engine.reports import WorkKey
from draftwood_service.serving import ServedModel

_log = structlog.get_logger("draftwood.losslessness")

MARGIN_BOUNDS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Upper bounds of the histogram of margins; the last bin has none."""
_LATEST = 100
_TIE_BOUNDS = {"float32": 1e-4, "bfloat16": 2.0**-6, "float16": 2.0**-9}
"""Margins that rounding explains: for float32 what `draftwood bench lossless` allows, else four times the distance of
two neighbouring numbers; docs/lossless.md has what was measured."""


@dataclass(slots=True)
class AuditCounts:
    """Audits of one key.

    Attributes:
        audited: answers that were compared; dropped ones are not among them.
        tokens: compared.
        differing: answers that differ; ties: those of them that rounding explains.
        failed: audits that ended with an error.
        margins: differences by margin; one more than `MARGIN_BOUNDS`.
    """

    audited: int = 0
    tokens: int = 0
    differing: int = 0
    ties: int = 0
    dropped: int = 0
    failed: int = 0
    largest_margin: float = 0.0
    margins: list[int] = field(default_factory=lambda: [0] * (len(MARGIN_BOUNDS) + 1))


class AuditRecorder:
    """Counts the audits of a served model, and logs each difference. For the event loop only.

    Attributes:
        counts: by key, for metrics.
        differences: the latest results that differ, the latest first.
        tie_bound: differences with a smaller margin are ties; 0 where answers are the same bits.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.counts: defaultdict[WorkKey, AuditCounts] = defaultdict(AuditCounts)
        self.differences: deque[AuditResult] = deque(maxlen=_LATEST)
        self.tie_bound = tie_bound(model.dtype, model.exact)

    def record(self, result: AuditResult) -> None:
        """Counts a result, and logs it if it is a difference: ties as warnings, others as errors."""
        counts = self.counts[WorkKey(result.strategy, result.arm)]
        match result.outcome:
            case AuditOutcome.DROPPED:
                counts.dropped += 1
            case AuditOutcome.FAILED:
                counts.failed += 1
            case AuditOutcome.SAME | AuditOutcome.DIFFERENT:
                counts.audited += 1
                counts.tokens += result.tokens
        if result.difference is not None:
            self._differs(result, result.difference, counts)

    def is_tie(self, difference: Difference) -> bool:
        """Whether rounding explains it."""
        return difference.margin < self.tie_bound

    def _differs(self, result: AuditResult, difference: Difference, counts: AuditCounts) -> None:
        counts.differing += 1
        counts.margins[bisect_right(MARGIN_BOUNDS, difference.margin)] += 1
        counts.largest_margin = max(counts.largest_margin, difference.margin)
        self.differences.appendleft(result)
        tie = self.is_tie(difference)
        counts.ties += tie
        log = _log.warning if tie else _log.error
        log(
            "answer differs by a tie" if tie else "answer is not that of plain decoding",
            tenant=result.tenant,
            request_id=result.request_id,
            position=difference.position,
            margin=difference.margin if math.isfinite(difference.margin) else "infinite",
            tie_bound=self.tie_bound,
            model=self.model.name,
            dtype=self.model.dtype,
            runner=self.model.runner_name,
            strategy=result.strategy,
            arm=result.arm,
        )


def tie_bound(dtype: str, exact: bool) -> float:
    """The margin up to which rounding explains a difference; 0 where logits are the same bits."""
    return 0.0 if exact else _TIE_BOUNDS[dtype]
