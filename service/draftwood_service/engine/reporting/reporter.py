"""Reports the engine's work once a second, from a thread of its own: no step waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue

import structlog

from draftwood_memory.counters import MemoryCounters
from draftwood_model_runner.errors import EngineStoppedError
from draftwood_model_runner.sequence import Sequence
from draftwood_service.engine.loaded import StepEngine
from draftwood_service.engine.reporting.report import EngineReport, Load, TenantReport, WorkCounts, WorkKey

_log = structlog.get_logger(__name__)

REPORT_SECONDS = 1.0
_MAX_TENANTS = 10_000
"""Tenants with counts of their own; the least recently active are dropped. 500 bytes each."""


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
        if len(self._tenants) > _MAX_TENANTS:
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
    return WorkKey(sequence.request.strategy_name, sequence.request.arm)


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
