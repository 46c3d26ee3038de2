"""What drafting did in an engine, and how memory and store are: metrics under the names that Draftwood's server has.

Nothing is counted by tenant, so that no tenant's use shows to another, and series do not grow with tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
        field: of `DraftCounts` or `MemoryCounters`.
    """

    name: str
    kind: Kind
    description: str
    field: str


Point: TypeAlias = tuple[Metric, dict[str, str], float]
"""A value with its labels."""

STRATEGY, ARM = "draftwood_strategy", "draftwood_arm"
OF_DRAFTS = (
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
OF_MEMORY = (
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
ALL = (*OF_DRAFTS, *OF_MEMORY, STORE_UP, DRAFTING_UP)


@dataclass(slots=True)
class DraftCounts:
    """What drafting did for some requests; names as in `draftwood_service.engine.reporting.report.WorkCounts`."""

    sequences: int = 0
    written_tokens: int = 0
    decode_steps: int = 0
    drafts: int = 0
    proposed_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    disabled: int = 0
    suspensions: int = 0

    def add(self, session: Session) -> None:
        """Counts what was done for a request so far."""
        stats = session.stats
        self.sequences += 1
        self.written_tokens += session.seen - session.request.prompt.shape[0]
        self.decode_steps += stats.decode_steps
        self.drafts += stats.drafts
        self.proposed_tokens += stats.proposed_tokens
        self.draft_tokens += stats.drafted
        self.accepted_tokens += stats.accepted
        self.draft_seconds += stats.draft_seconds
        self.disabled += bool(stats.drafting_disabled_reason)
        self.suspensions += stats.suspensions

    def plus(self, other: DraftCounts) -> DraftCounts:
        """Both together, as new counts."""
        names = [metric.field for metric in OF_DRAFTS]
        return DraftCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Figures:
    """Counts the requests of an engine, those that still run included."""

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], DraftCounts] = {}

    def ended(self, session: Session) -> None:
        """A request ended."""
        self._ended.setdefault(_key(session), DraftCounts()).add(session)

    def points(self, running: Iterable[Session], memory: MemoryCounters, healthy: bool, drafting: bool) -> list[Point]:
        """All metrics as of now."""
        counts: dict[tuple[str, str], DraftCounts] = {}
        for session in running:
            counts.setdefault(_key(session), DraftCounts()).add(session)
        for key, ended in self._ended.items():
            counts[key] = counts.get(key, DraftCounts()).plus(ended)
        return [*_points(counts, memory), (STORE_UP, {}, float(healthy)), (DRAFTING_UP, {}, float(drafting))]


def _points(counts: dict[tuple[str, str], DraftCounts], memory: MemoryCounters) -> Iterator[Point]:
    for (strategy, arm), of_key in counts.items():
        for metric in OF_DRAFTS:
            yield metric, {STRATEGY: strategy, ARM: arm}, getattr(of_key, metric.field)
    for metric in OF_MEMORY:
        yield metric, {}, getattr(memory, metric.field)


def _key(session: Session) -> tuple[str, str]:
    """Strategy and arm. A name that a caller made up counts as none, so that callers add no series."""
    request = session.request
    drafts = request.max_draft_nodes > 0 and request.strategy_name in strategy_names()
    return request.strategy_name if drafts else "none", session.options.arm
