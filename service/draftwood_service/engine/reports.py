"""The engine's report: its work since the service started, and its load now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from queue import Empty, SimpleQueue
from typing import NamedTuple

import structlog

from draftwood_memory.counters import MemoryCounters
from draftwood_model_runner.errors import EngineStoppedError
from draftwood_model_runner.sequence import EngineCounts, KVUse, Sequence, SequenceState, SequenceStats, StateUse
from draftwood_service.engine.loaded import StepEngine
from draftwood_strategies.base import SourceCounts

_MAX_TENANTS = 1000
"""Tenants that are remembered; those that were active least recently are dropped."""

_log = structlog.get_logger(__name__)
REPORT_SECONDS = 1.0
_MAX_COUNTED = 10_000
"""Tenants with counts of their own; the least recently active are dropped. 500 bytes each."""


class WorkKey(NamedTuple):
    """What work is counted by: the strategy of a request, and its arm, "" outside of experiments."""

    strategy: str
    arm: str


@dataclass(slots=True)
class WorkCounts:
    """What was done for some sequences, those that still run included.

    Attributes:
        sequences: that have begun.
        prompt_tokens, cached_prompt_tokens: of their prompts, and those of them that were found in the prefix cache.
        written_tokens: of their answers.
        decode_steps: sequences' steps that wrote tokens: a step of three sequences counts three times.
        drafts: decoding steps with draft tokens.
        proposed_tokens, draft_tokens, accepted_tokens: draft tokens that strategies proposed, that were verified, and
            that were accepted.
        accepted_by_depth: for each depth of the draft tree, in how many steps a node of it was accepted.
        by_source: draft tokens of the sequences that have ended, by what proposed them.
        draft_seconds: time in drafters.
        disabled: sequences that drafting was switched off for, since their drafter failed or a call took too long.
        suspensions: how often drafting, or a source of it, was suspended for some steps since it did not pay.
        preemptions: how often a sequence lost its slot to another.
    """

    sequences: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    written_tokens: int = 0
    decode_steps: int = 0
    drafts: int = 0
    proposed_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    by_source: dict[str, SourceCounts] = field(default_factory=dict)
    draft_seconds: float = 0.0
    disabled: int = 0
    suspensions: int = 0
    preemptions: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens written by a decoding step of a sequence, on average; 0 if there was none."""
        return self.written_tokens / self.decode_steps if self.decode_steps else 0.0

    @classmethod
    def of(cls, sequence: Sequence) -> WorkCounts:
        """What was done for a sequence so far."""
        stats = sequence.stats
        if not stats.first_scheduled_at:
            return cls()
        ended = sequence.state is SequenceState.FINISHED
        return cls(
            sequences=1,
            prompt_tokens=int(sequence.request.prompt.size),
            written_tokens=len(sequence.output),
            disabled=bool(stats.drafting_disabled_reason),
            # A hybrid tells what its parts proposed when it is closed.
            by_source=stats.sources(sequence.request.drafting.strategy) if ended else {},
            accepted_by_depth=[*stats.accepted_by_depth],
            **{name: getattr(stats, name) for name in _OF_STATISTICS},
        )

    def plus(self, other: WorkCounts) -> WorkCounts:
        """Both together, as new counts."""
        depths = zip_longest(self.accepted_by_depth, other.accepted_by_depth, fillvalue=0)
        return WorkCounts(
            accepted_by_depth=[*map(sum, depths)],
            by_source=SourceCounts.summed([self.by_source, other.by_source]),
            **{name: getattr(self, name) + getattr(other, name) for name in _NUMBERS},
        )


_NUMBERS = [count.name for count in fields(WorkCounts) if count.name not in ("accepted_by_depth", "by_source")]
_OF_STATISTICS = sorted({*_NUMBERS} & {field.name for field in fields(SequenceStats)})


class Load(NamedTuple):
    """Sequences now. Paused ones are neither: their clients do not read."""

    running: int = 0
    waiting: int = 0

    def plus(self, state: SequenceState) -> Load:
        """With one more sequence in this state."""
        return Load(self.running + (state is SequenceState.RUNNING), self.waiting + (state is SequenceState.WAITING))


@dataclass(frozen=True, slots=True)
class TenantReport:
    """A tenant's part."""

    load: Load
    work: WorkCounts


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine has done, and its load now.

    Attributes:
        engine: steps and their time.
        load: of all tenants.
        kv: pages of KV memory now.
        states: memory of recurrent layers' states now.
        work: by strategy and arm.
        tenants: those that were active since the report before, with all of their work.
        memory: of the memories in the engine's process.
        store_healthy: the store answers; true for one in this process.
        own_text_failed: the model's own text ended with an error.
    """

    engine: EngineCounts = field(default_factory=EngineCounts)
    load: Load = field(default_factory=Load)
    kv: KVUse = field(default_factory=KVUse)
    states: StateUse = field(default_factory=StateUse)
    work: dict[WorkKey, WorkCounts] = field(default_factory=dict)
    tenants: dict[str, TenantReport] = field(default_factory=dict)
    memory: MemoryCounters = field(default_factory=MemoryCounters)
    store_healthy: bool = True
    own_text_failed: bool = False


class ReportHistory:
    """The latest report, with counts that go on when the engine is restarted, and the tenants of all reports.

    Attributes:
        latest: whose `tenants` are all those that are remembered, the ones that were active last at the end.
        at: when the latest report came, or the engine was started, on the clock of `time.monotonic`.
        budget: draft tokens verified by a decoding step of a sequence, on average, between the latest two reports.
    """

    def __init__(self) -> None:
        self.latest = EngineReport()
        self.budget = 0.0
        self.at = time.monotonic()
        self._before = EngineReport()

    def restarted(self) -> None:
        """Another engine reports from now on: its counts begin at 0."""
        self.at = time.monotonic()
        idle = {name: TenantReport(Load(), known.work) for name, known in self.latest.tenants.items()}
        memory = replace(self.latest.memory, tenants=0, tokens=0, index_bytes=0, resident_bytes=0, outbox_records=0)
        self._before = self.latest = replace(
            self.latest,
            load=Load(),
            kv=KVUse(self.latest.kv.total, 0, 0),
            states=StateUse(),
            tenants=idle,
            memory=memory,
            own_text_failed=False,
        )

    def add(self, report: EngineReport) -> None:
        """Takes a report of the present engine."""
        self.at = time.monotonic()
        before = self._before
        tenants = {name: TenantReport(Load(), known.work) for name, known in self.latest.tenants.items()}
        for name, reported in report.tenants.items():
            tenants.pop(name, None)
            known = before.tenants.get(name)
            tenants[name] = reported if known is None else TenantReport(reported.load, reported.work.plus(known.work))
        for name in [*tenants][: max(0, len(tenants) - _MAX_TENANTS)]:
            del tenants[name]
        work = dict(before.work)
        for key, counts in report.work.items():
            work[key] = counts if key not in before.work else counts.plus(before.work[key])
        self.budget = _budget(self.latest.work, work)
        self.latest = replace(report, engine=report.engine.plus(before.engine), work=work, tenants=tenants)


def _budget(before: Mapping[WorkKey, WorkCounts], after: Mapping[WorkKey, WorkCounts]) -> float:
    steps, tokens = (
        sum(getattr(counts, name) for counts in after.values())
        - sum(getattr(counts, name) for counts in before.values())
        for name in ("decode_steps", "draft_tokens")
    )
    return tokens / steps if steps > 0 else 0.0


class WorkRecorder:
    """The work that was done for sequences that have ended. For the engine's thread only.

    Attributes:
        own_text_failed: as in `EngineReport`.
    """

    def __init__(self) -> None:
        self.own_text_failed = False
        self._work: dict[WorkKey, WorkCounts] = {}
        self._tenants: dict[str, WorkCounts] = {}
        self._active: set[str] = set()

    def ended(self, sequence: Sequence) -> None:
        """Counts a sequence that has left the engine."""
        tenant, work = sequence.request.tenant, WorkCounts.of(sequence)
        self._work[_key(sequence)] = self._work.get(_key(sequence), _NONE).plus(work)
        self._tenants[tenant] = self._tenants.pop(tenant, _NONE).plus(work)  # the last one is the latest active
        self._active.add(tenant)
        if len(self._tenants) > _MAX_COUNTED:
            del self._tenants[next(iter(self._tenants))]

    def report(self, engine: StepEngine, live: Iterable[Sequence]) -> EngineReport:
        """All work until now, with that of live sequences, and the load. Without what is known of memories."""
        work = dict(self._work)
        # A tenant is reported once more after its last sequence ended, so that its load falls to 0.
        tenants = {name: TenantReport(Load(), self._tenants.get(name, _NONE)) for name in self._active}
        self._active = set()
        load = Load()
        for sequence in live:
            tenant, done = sequence.request.tenant, WorkCounts.of(sequence)
            work[_key(sequence)] = work.get(_key(sequence), _NONE).plus(done)
            known = tenants.get(tenant) or TenantReport(Load(), self._tenants.get(tenant, _NONE))
            tenants[tenant] = TenantReport(known.load.plus(sequence.state), known.work.plus(done))
            load = load.plus(sequence.state)
            self._active.add(tenant)
        return EngineReport(
            engine=engine.counts,
            load=load,
            kv=engine.kv_use,
            states=engine.state_use,
            work=work,
            tenants=tenants,
            own_text_failed=self.own_text_failed,
        )


_NONE = WorkCounts()


def _key(sequence: Sequence) -> WorkKey:
    return WorkKey(sequence.request.drafting.strategy, sequence.request.arm)


class Reporter:
    """Asks the engine's thread for its part, adds that of the memories, and sends the report.

    Args:
        collect: the engine's part; called between two steps.
        between_steps: runs a task there.
        send: sends a report; raises EOFError when the service has ended.
        memory: counters of the memories, and whether their store answers. Called on the reporter's thread.
    """

    def __init__(
        self,
        collect: Callable[[], EngineReport],
        between_steps: Callable[[Callable[[], None]], None],
        send: Callable[[EngineReport], None],
        memory: Callable[[], tuple[MemoryCounters, bool]],
    ) -> None:
        self._collect = collect
        self._between_steps = between_steps
        self._send = send
        self._memory = memory
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Reports no more; does not wait for a report that is being made."""
        self._stopping.set()

    def _run(self) -> None:
        parts: SimpleQueue[EngineReport | None] = SimpleQueue()

        def collect() -> None:
            try:
                parts.put(self._collect())
            except Exception:
                _log.exception("report could not be made")
                parts.put(None)

        with suppress(EngineStoppedError, EOFError):
            while not self._stopping.wait(REPORT_SECONDS):
                self._between_steps(collect)
                part = self._next(parts)
                if part is not None:
                    counters, healthy = self._memory()
                    self._send(replace(part, memory=counters, store_healthy=healthy))

    def _next(self, parts: SimpleQueue[EngineReport | None]) -> EngineReport | None:
        """Waits for the end of the engine's step; None at the end, or for a report that could not be made."""
        while not self._stopping.is_set():
            with suppress(Empty):
                return parts.get(timeout=REPORT_SECONDS)
        return None
