"""What drafting did in an engine, and how memory and store are: metrics under the names that Draftwood's server has.

Nothing is counted by tenant, so that no tenant's use shows to another, and series do not grow with tenants.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, TypeAlias

from draftwood_memory.counters import MemoryCounters
from draftwood_memory.engines.session import Session
from draftwood_strategies.registry import strategy_names


class Kind(Enum):
    """A counter, or a gauge with how the values of a server's engines become one."""

    COUNTER = "counter"
    SUM, LEAST, LARGEST = "sum", "min", "max"


class Metric(NamedTuple):
    """A metric.

    Attributes:
        name: for Prometheus, that of a counter without its `_total`.
        field: of `Counts` or `MemoryCounters`.
    """

    name: str
    kind: Kind
    description: str
    field: str


DataPoint: TypeAlias = tuple[Metric, dict[str, str], float]
"""A value with its labels."""

STRATEGY, ARM = "draftwood_strategy", "draftwood_arm"
DRAFT_METRICS = (
    Metric("draftwood_sequences", Kind.COUNTER, "Samples of requests that began", "sequences"),
    Metric("draftwood_output_tokens", Kind.COUNTER, "Tokens written", "written_tokens"),
    Metric("draftwood_decode_steps", Kind.COUNTER, "Requests' steps that wrote tokens", "decode_steps"),
    Metric("draftwood_drafts", Kind.COUNTER, "Draft trees that were verified", "drafts"),
    Metric("draftwood_draft_proposed_tokens", Kind.COUNTER, "Draft tokens proposed", "proposed_tokens"),
    Metric("draftwood_draft_tokens", Kind.COUNTER, "Draft tokens verified", "draft_tokens"),
    Metric("draftwood_draft_accepted_tokens", Kind.COUNTER, "Draft tokens accepted", "accepted_tokens"),
    Metric("draftwood_draft_time_seconds", Kind.COUNTER, "Time in drafters", "draft_seconds"),
    Metric("draftwood_draft_disabled", Kind.COUNTER, "Samples whose drafter failed or hung", "disabled"),
    Metric("draftwood_draft_suspended", Kind.COUNTER, "Times that drafting paused as it was too slow", "suspensions"),
)
"""By strategy and arm."""
MEMORY_METRICS = (
    Metric("draftwood_memory_memories", Kind.SUM, "Memories in the process", "tenants"),
    Metric("draftwood_memory_tokens", Kind.SUM, "Their tokens", "tokens"),
    Metric("draftwood_memory_size_bytes", Kind.SUM, "Their records and indexes", "resident_bytes"),
    Metric("draftwood_memory_evicted", Kind.COUNTER, "Memories evicted from the process", "evicted"),
    Metric("draftwood_memory_late", Kind.COUNTER, "Requests that began before their memory was loaded", "late"),
    Metric("draftwood_memory_learned", Kind.COUNTER, "Records taken from answers", "learned"),
    Metric("draftwood_memory_dropped", Kind.COUNTER, "Records lost: the outbox was full", "dropped"),
    Metric(
        "draftwood_store_lag_seconds",
        Kind.LARGEST,
        "From an answer's end to its record's confirmation, latest",
        "last_lag",
    ),
    Metric("draftwood_store_pending", Kind.SUM, "Records that the store has not confirmed", "outbox_records"),
    Metric("draftwood_store_failures", Kind.COUNTER, "Rounds with the store that failed", "failures"),
    Metric("draftwood_store_unreadable", Kind.COUNTER, "Values that could not be decoded", "unreadable"),
)
STORE_UP = Metric("draftwood_store_up", Kind.LEAST, "1 while the store answers, else 0", "")
DRAFTING_UP = Metric(
    "draftwood_drafting_up", Kind.LEAST, "1 while the engine's steps are drafted for, 0 after a failure", ""
)
"""0 where drafts could not be opened, and from a step whose drafting raised to the next one that is drafted for."""
ALL_METRICS = (*DRAFT_METRICS, *MEMORY_METRICS, STORE_UP, DRAFTING_UP)


Counts: TypeAlias = dict[str, float]
"""By the fields of `DRAFT_METRICS`."""


class DraftMetrics:
    """Counts the requests of an engine, those that still run included."""

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], Counts] = {}

    def ended(self, session: Session) -> None:
        """A request ended."""
        _add(self._ended, session)

    def points(
        self, running: Iterable[Session], memory: MemoryCounters, healthy: bool, drafting: bool
    ) -> list[DataPoint]:
        """All metrics as of now."""
        counts = {key: {**ended} for key, ended in self._ended.items()}
        for session in running:
            _add(counts, session)
        of_drafts = [
            (metric, {STRATEGY: strategy, ARM: arm}, of_key[metric.field])
            for (strategy, arm), of_key in counts.items()
            for metric in DRAFT_METRICS
        ]
        of_memory: list[DataPoint] = [(metric, {}, getattr(memory, metric.field)) for metric in MEMORY_METRICS]
        return [*of_drafts, *of_memory, (STORE_UP, {}, float(healthy)), (DRAFTING_UP, {}, float(drafting))]


def _add(counts: dict[tuple[str, str], Counts], session: Session) -> None:
    """Adds what was done for a request so far; it counts from its first token on."""
    if not session.output:
        return
    of_key = counts.setdefault(_key(session), dict.fromkeys((metric.field for metric in DRAFT_METRICS), 0.0))
    for field, value in _counts_of(session).items():
        of_key[field] += value


def _counts_of(session: Session) -> Counts:
    """Names as in `draftwood_service.engine.reports.WorkCounts`."""
    stats = session.stats
    return {
        "sequences": 1,
        "written_tokens": session.seen - session.request.prompt.shape[0],
        "decode_steps": stats.decode_steps,
        "drafts": stats.drafts,
        "proposed_tokens": stats.proposed_tokens,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "draft_seconds": stats.draft_seconds,
        "disabled": bool(stats.drafting_disabled_reason),
        "suspensions": stats.suspensions,
    }


def _key(session: Session) -> tuple[str, str]:
    """Strategy and arm. A name that a caller made up counts as none, so that callers add no series."""
    request = session.request
    drafts = request.drafting.max_nodes > 0 and request.drafting.strategy in strategy_names()
    return request.drafting.strategy if drafts else "none", session.options.arm
