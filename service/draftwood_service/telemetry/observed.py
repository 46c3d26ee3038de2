"""The values of the metrics that are read when they are collected, from the counters of a server.

Called on the collectors' threads: what is read is replaced as a whole, never changed, or copied in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

from draftwood_service.engine.reporting.report import EngineReport, TenantReport, WorkCounts
from draftwood_service.telemetry import names
from draftwood_service.telemetry.names import Metric

if TYPE_CHECKING:
    from draftwood_service.rpc.server import RunningServer

Point: TypeAlias = tuple[float, dict[str, str]]
"""A value, and the attributes that it has."""
_DEPTHS = 16
"""Depths of draft trees that are counted apart. Not tuned: few accepted paths are longer."""


class Observed:
    """Reads the metrics of a server.

    Args:
        tenants: whose figures are shown by name; no others are.
        loop_lag: the longest delay of the event loop of late, in seconds.
    """

    def __init__(self, server: RunningServer, tenants: frozenset[str], loop_lag: Callable[[], float]) -> None:
        self._server = server
        self._tenants = tenants
        self._loop_lag = loop_lag
        memory = self._memory
        self._readers: dict[Metric, Callable[[], Iterable[Point]]] = {
            names.BUILD: self._build,
            names.SERVING: lambda: _one(float(server.serving)),
            names.SLOTS: lambda: _one(server.slots),
            names.RUNNING: lambda: _one(self._report.load.running),
            names.WAITING: lambda: _one(self._report.load.waiting),
            names.STEPS: lambda: _one(self._report.engine.steps),
            names.STEP_TIME: lambda: _one(self._report.engine.step_seconds),
            names.MODEL_TIME: lambda: _one(self._report.engine.model_seconds),
            names.RESTARTS: lambda: _one(server.recovery.restarts),
            names.LOOP_LAG: lambda: _one(self._loop_lag()),
            names.KV_PAGES: self._pages,
            names.KV_UTILIZATION: lambda: _one(self._report.kv.held / max(self._report.kv.total, 1)),
            names.PREEMPTIONS: self._work(lambda work: work.preemptions),
            names.SEQUENCES: self._work(lambda work: work.sequences),
            names.PROMPT_TOKENS: self._work(lambda work: work.prompt_tokens),
            names.PROMPT_CACHED: self._work(lambda work: work.cached_prompt_tokens),
            names.WRITTEN: self._work(lambda work: work.written_tokens),
            names.DECODE_STEPS: self._work(lambda work: work.decode_steps),
            names.DRAFTS: self._work(lambda work: work.drafts),
            names.PROPOSED: self._work(lambda work: work.proposed_tokens),
            names.VERIFIED: self._work(lambda work: work.draft_tokens),
            names.ACCEPTED: self._work(lambda work: work.accepted_tokens),
            names.BY_DEPTH: self._depths,
            names.SOURCE_VERIFIED: lambda: self._sources(0),
            names.SOURCE_ACCEPTED: lambda: self._sources(1),
            names.BUDGET: lambda: _one(server.bridge.reports.budget),
            names.DRAFT_TIME: self._work(lambda work: work.draft_seconds),
            names.DISABLED: self._work(lambda work: work.disabled),
            names.SUSPENDED: self._work(lambda work: work.suspensions),
            names.TENANT_RUNNING: self._of_tenants(lambda one: one.load.running),
            names.TENANT_WAITING: self._of_tenants(lambda one: one.load.waiting),
            names.TENANT_WRITTEN: self._of_tenants(lambda one: one.work.written_tokens),
            names.TENANT_STEPS: self._of_tenants(lambda one: one.work.decode_steps),
            names.MEMORIES: memory("tenants"),
            names.MEMORY_TOKENS: memory("tokens"),
            names.MEMORY_BYTES: memory("resident_bytes"),
            names.EVICTED: memory("evicted"),
            names.LATE: memory("late"),
            names.LEARNED: memory("learned"),
            names.DROPPED: memory("dropped"),
            names.STORE_UP: lambda: _one(float(self._report.store_healthy)),
            names.STORE_LAG: memory("last_lag"),
            names.STORE_PENDING: memory("outbox_records"),
            names.STORE_FAILURES: memory("failures"),
            names.STORE_UNREADABLE: memory("unreadable"),
            names.AUDITS: self._audits,
            names.AUDIT_MARGIN: self._margins,
            names.QUOTA_OUTAGES: lambda: _one(server.limiter.outages),
            names.QUOTA_ALONE: lambda: _one(server.limiter.admitted_alone),
            names.REFUSED: self._refused,
        }

    def __call__(self, metric: Metric) -> Iterable[Point]:
        """The points of one of `names.OBSERVED`."""
        return self._readers[metric]()

    @property
    def _report(self) -> EngineReport:
        return self._server.bridge.reports.latest

    def _build(self) -> Iterator[Point]:
        model = self._server.model
        of_model = {names.MODEL: model.name, names.RUNNER: model.runner_name, names.DTYPE: model.dtype}
        of_model[names.ENGINE] = model.abilities.engine
        yield 1.0, {names.VERSION: version("draftwood"), **of_model}

    def _pages(self) -> Iterator[Point]:
        total, held, cached = self._report.kv
        for state, pages in (("held", held), ("cached", cached), ("free", total - held - cached)):
            yield pages, {names.STATE: state}

    def _work(self, value: Callable[[WorkCounts], float]) -> Callable[[], Iterator[Point]]:
        def points() -> Iterator[Point]:
            for (strategy, arm), work in self._report.work.items():
                yield value(work), {names.STRATEGY: strategy, names.ARM: arm}

        return points

    def _depths(self) -> Iterator[Point]:
        for (strategy, arm), work in self._report.work.items():
            by_depth = work.accepted_by_depth
            counts = [*by_depth[: _DEPTHS - 1], *([sum(by_depth[_DEPTHS - 1 :])] if len(by_depth) >= _DEPTHS else [])]
            for depth, accepted in enumerate(counts, 1):
                yield accepted, {names.STRATEGY: strategy, names.ARM: arm, names.DEPTH: str(depth)}

    def _sources(self, part: int) -> Iterator[Point]:
        totals: dict[str, float] = {}
        for work in self._report.work.values():
            for source, counts in work.by_source.items():
                totals[source] = totals.get(source, 0) + counts[part]
        for source, total in totals.items():
            yield total, {names.SOURCE: source}

    def _of_tenants(self, value: Callable[[TenantReport], float]) -> Callable[[], Iterator[Point]]:
        def points() -> Iterator[Point]:
            tenants = self._report.tenants
            for tenant in self._tenants:
                if tenant in tenants:
                    yield value(tenants[tenant]), {names.TENANT: tenant}

        return points

    def _memory(self, counter: str) -> Callable[[], Iterator[Point]]:
        return lambda: _one(getattr(self._report.memory, counter))

    def _audits(self) -> Iterator[Point]:
        for (strategy, arm), counts in [*self._server.audits.counts.items()]:
            outcomes = {
                "same": counts.audited - counts.differing,
                "tie": counts.ties,
                "different": counts.differing - counts.ties,
                "dropped": counts.dropped,
                "failed": counts.failed,
            }
            for outcome, answers in outcomes.items():
                yield answers, {names.OUTCOME: outcome, names.STRATEGY: strategy, names.ARM: arm}

    def _margins(self) -> Iterator[Point]:
        for (strategy, arm), counts in [*self._server.audits.counts.items()]:
            yield counts.largest_margin, {names.STRATEGY: strategy, names.ARM: arm}

    def _refused(self) -> Iterator[Point]:
        gate: Any = self._server.gate
        for reason, refusals in (("unauthenticated", gate.unauthenticated), ("denied", gate.denied)):
            yield refusals.total, {names.REASON: reason}


def _one(value: float) -> Iterator[Point]:
    yield value, {}
