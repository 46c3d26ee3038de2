"""The metrics that are read when they are collected, each with its value, from the counters of a server.

Called on the collectors' threads: what is read is replaced as a whole, never changed, or copied in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from typing import Any, TypeAlias

from draftwood_memory.counters import MemoryCounters
from draftwood_service.engine.reports import EngineReport
from draftwood_service.figures import MEMORY, WORK, Figure
from draftwood_service.telemetry import names
from draftwood_service.telemetry.base import WatchedServer
from draftwood_service.telemetry.names import ARM, STRATEGY, Kind, Metric

Point: TypeAlias = tuple[float, dict[str, str]]
"""A value, and the attributes that it has."""
_WORK = (STRATEGY, ARM)
_BUILD = (names.VERSION, names.MODEL, names.ENGINE, names.RUNNER, names.DTYPE)
_DEPTHS = 16
"""Depths of draft trees that are counted apart. Few accepted paths are longer."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the metrics are read from.

    Attributes:
        tenants: whose figures are shown by name; no others are.
        loop_lag: the longest delay of the event loop in the last 10 s, in seconds.
    """

    server: WatchedServer
    tenants: frozenset[str]
    loop_lag: Callable[[], float]

    @property
    def report(self) -> EngineReport:
        """The engine's latest."""
        return self.server.bridge.reports.latest

    @property
    def memory(self) -> MemoryCounters:
        """Counters of the engine's memories."""
        return self.report.memory

    def points(self, metric: Metric) -> Iterable[Point]:
        """The points of a key of `OBSERVED`."""
        return OBSERVED[metric](self)


Read: TypeAlias = Callable[[Observed], Iterable[Point]]


def _build(it: Observed) -> Iterator[Point]:
    model = it.server.model
    of_model = {names.MODEL: model.name, names.RUNNER: model.runner_name, names.DTYPE: model.dtype}
    yield 1.0, {names.VERSION: version("draftwood"), names.ENGINE: model.abilities.engine, **of_model}


def _loop_lag(it: Observed) -> Iterator[Point]:
    yield it.loop_lag(), {}


def _pages(it: Observed) -> Iterator[Point]:
    total, held, cached = it.report.kv
    for state, pages in (("held", held), ("cached", cached), ("free", total - held - cached)):
        yield pages, {names.STATE: state}


def _utilization(it: Observed) -> Iterator[Point]:
    yield it.report.kv.held / max(it.report.kv.total, 1), {}


def _states(it: Observed) -> Iterator[Point]:
    for state, size in it.report.states._asdict().items():
        yield size, {names.STATE: state}


def _depths(it: Observed) -> Iterator[Point]:
    for (strategy, arm), work in it.report.work.items():
        by_depth = work.accepted_by_depth
        counts = [*by_depth[: _DEPTHS - 1], *([sum(by_depth[_DEPTHS - 1 :])] if len(by_depth) >= _DEPTHS else [])]
        for depth, accepted in enumerate(counts, 1):
            yield accepted, {STRATEGY: strategy, ARM: arm, names.DEPTH: str(depth)}


def _audits(it: Observed) -> Iterator[Point]:
    for (strategy, arm), counts in [*it.server.audits.counts.items()]:
        outcomes = {
            "same": counts.audited - counts.differing,
            "tie": counts.ties,
            "different": counts.differing - counts.ties,
            "dropped": counts.dropped,
            "failed": counts.failed,
        }
        for outcome, answers in outcomes.items():
            yield answers, {names.OUTCOME: outcome, STRATEGY: strategy, ARM: arm}


def _margins(it: Observed) -> Iterator[Point]:
    for (strategy, arm), counts in [*it.server.audits.counts.items()]:
        yield counts.largest_margin, {STRATEGY: strategy, ARM: arm}


def _refused(it: Observed) -> Iterator[Point]:
    gate = it.server.gate
    for reason, refusals in (("unauthenticated", gate.unauthenticated), ("denied", gate.denied)):
        yield refusals.total, {names.REASON: reason}


def _gauge(name: str, unit: str, description: str, read: str | Read, *attributes: str) -> tuple[Metric, Read]:
    """`read` is the path from `Observed` to the one value, or what reads the points."""
    return Metric(name, Kind.GAUGE, unit, description, attributes), _one(read) if isinstance(read, str) else read


def _counter(name: str, unit: str, description: str, read: str | Read, *attributes: str) -> tuple[Metric, Read]:
    """As `_gauge`."""
    metric, points = _gauge(name, unit, description, read, *attributes)
    return metric._replace(kind=Kind.COUNTER), points


def _one(path: str) -> Read:
    value: Callable[[Observed], Any] = attrgetter(path)
    return lambda it: [(float(value(it)), {})]


def _work(figure: Figure) -> tuple[Metric, Read]:
    """A field of `WorkCounts`, by strategy and arm."""

    def points(it: Observed) -> Iterator[Point]:
        for (strategy, arm), work in it.report.work.items():
            yield getattr(work, figure.source), {STRATEGY: strategy, ARM: arm}

    return Metric(figure.metric, Kind.COUNTER, figure.unit, figure.description, _WORK), points


def _memory(figure: Figure) -> tuple[Metric, Read]:
    """A field of `MemoryCounters`."""
    kind = Kind.COUNTER if figure.counts_up else Kind.GAUGE
    return Metric(figure.metric, kind, figure.unit, figure.description), _one(f"memory.{figure.source}")


def _source(name: str, description: str, count: str) -> tuple[Metric, Read]:
    """A field of `SourceCounts`, by source."""

    def points(it: Observed) -> Iterator[Point]:
        totals: dict[str, float] = {}
        for work in it.report.work.values():
            for source, counts in work.by_source.items():
                totals[source] = totals.get(source, 0) + getattr(counts, count)
        for source, total in totals.items():
            yield total, {names.SOURCE: source}

    return Metric(name, Kind.COUNTER, "{token}", description, (names.SOURCE,)), points


def _tenant(kind: Kind, name: str, unit: str, description: str, path: str) -> tuple[Metric, Read]:
    """A value of each tenant that is shown by name; `path` leads to it from `TenantReport`."""
    value: Callable[[Any], float] = attrgetter(path)

    def points(it: Observed) -> Iterator[Point]:
        tenants = it.report.tenants
        for tenant in it.tenants & tenants.keys():
            yield value(tenants[tenant]), {names.TENANT: tenant}

    return Metric(name, kind, unit, description, (names.TENANT,)), points


_ALL = (
    _gauge("draftwood.build", "1", "Always 1", _build, *_BUILD),
    _gauge("draftwood.serving", "1", "1 while health is SERVING, else 0", "server.serving"),
    _gauge("draftwood.slots", "{request}", "Requests that can run at once", "server.slots"),
    _gauge("draftwood.requests.running", "{request}", "Requests that run", "report.load.running"),
    _gauge("draftwood.requests.waiting", "{request}", "Requests that wait for a slot", "report.load.waiting"),
    _counter("draftwood.engine.steps", "{step}", "Steps of the engine", "report.engine.steps"),
    _counter("draftwood.engine.step_time", "s", "Time in them", "report.engine.step_seconds"),
    _counter("draftwood.engine.model_time", "s", "Time in their forward passes", "report.engine.model_seconds"),
    _counter("draftwood.engine.restarts", "{restart}", "Engines restarted after one died", "server.recovery.restarts"),
    _gauge("draftwood.event_loop.lag", "s", "Longest delay of the event loop in the last 10 s", _loop_lag),
    _gauge("draftwood.kv_cache.pages", "{page}", "Pages of KV memory: held, cached, free", _pages, names.STATE),
    _gauge("draftwood.kv_cache.utilization", "1", "Share of the pages that requests hold", _utilization),
    _gauge("draftwood.states.size", "By", "Memory of recurrent layers' states: held, cached", _states, names.STATE),
    _counter(
        "draftwood.draft.accepted_by_depth",
        "{token}",
        "Draft tokens accepted at each depth of the tree; the last one counts all below it",
        _depths,
        *_WORK,
        names.DEPTH,
    ),
    _source("draftwood.draft.source.tokens", "Draft tokens verified, by what proposed them", "verified"),
    _source("draftwood.draft.source.accepted_tokens", "Of them, those accepted", "accepted"),
    _gauge(
        "draftwood.draft.budget",
        "{token}",
        "Draft tokens verified by a request's step in the last second",
        "server.bridge.reports.budget",
    ),
    _tenant(Kind.GAUGE, "draftwood.tenant.running", "{request}", "Requests that run", "load.running"),
    _tenant(Kind.GAUGE, "draftwood.tenant.waiting", "{request}", "Requests that wait for a slot", "load.waiting"),
    _tenant(Kind.COUNTER, "draftwood.tenant.output.tokens", "{token}", "Tokens written", "work.written_tokens"),
    _tenant(Kind.COUNTER, "draftwood.tenant.decode.steps", "{step}", "Steps that wrote tokens", "work.decode_steps"),
    _gauge("draftwood.own_text.failed", "1", "1 if the model's own text ended with an error", "report.own_text_failed"),
    _gauge("draftwood.store.up", "1", "1 while the store answers, else 0", "report.store_healthy"),
    _counter(
        "draftwood.audit.answers",
        "{answer}",
        "Answers decoded again: same, tie, different, dropped, failed",
        _audits,
        names.OUTCOME,
        *_WORK,
    ),
    _gauge("draftwood.audit.largest_margin", "1", "Of all differences that audits found", _margins, *_WORK),
    *map(_work, WORK),
    *map(_memory, MEMORY),
    _counter("draftwood.quota.outages", "{outage}", "Times that the quotas' store went away", "server.limiter.outages"),
    _counter(
        "draftwood.quota.admitted_alone", "{request}", "Requests admitted without it", "server.limiter.admitted_alone"
    ),
    _counter("draftwood.auth.refused", "{call}", "Calls refused: unauthenticated, denied", _refused, names.REASON),
)
OBSERVED: Mapping[Metric, Read] = dict(_ALL)
"""Each with what reads its points."""
