"""What drafting did, for a line of the engine's log each minute: an engine's own metrics know no strategies."""

from __future__ import annotations

import time
from dataclasses import dataclass

from draftwood_memory.counters import MemoryCounters
from draftwood_memory.engines.session import Session

_SECONDS = 60.0


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    drafted: int = 0
    accepted: int = 0


class Summary:
    """Counts requests that ended, by strategy, since the last line."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}
        self._since = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for a line: not where nothing ended."""
        return bool(self._counts) and time.monotonic() - self._since >= _SECONDS

    def add(self, session: Session) -> None:
        """A request ended."""
        name = session.request.strategy_name if session.request.max_draft_nodes else "no drafts"
        counts = self._counts.setdefault(name, _Counts())
        counts.requests += 1
        counts.drafted += session.stats.drafted
        counts.accepted += session.stats.accepted

    def line(self, counters: MemoryCounters, healthy: bool) -> str:
        """The line; counting begins anew."""
        counts, self._counts = self._counts, {}
        self._since = time.monotonic()
        parts = [
            f"{name}: {one.requests} requests, {one.accepted} of {one.drafted} draft tokens accepted"
            for name, one in sorted(counts.items())
        ]
        memory = f"{counters.tenants} tenants, {counters.tokens} tokens"
        waiting = f", {counters.outbox_records} records not stored yet" if counters.outbox_records else ""
        return "; ".join([*parts, f"memory: {memory}{waiting}, store {'answers' if healthy else 'does not answer'}"])
