"""One server's samples: what it has now, and what it did in the latest seconds."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, fields
from typing import Any

from draftwood_client.admin.status import LoadStatus, ServerStatus

WINDOW_SECONDS = 5.0
"""Rates are means over so long: steady to the eye, and soon at a new value."""
AWAY_SECONDS = 5.0
"""Without a sample for so long, and for three intervals, a server is shown as away."""
STALLED_SECONDS = 10.0
"""Without new figures of its engine for so long, a server is shown as stalled: a step takes less."""
CONNECTING = "connecting"

Counts = dict[str, float]
"""What a thing counted, by the names of its fields."""
Key = tuple[str, ...]
"""Of a thing: ("load",), ("tenant", name), ("drafting", strategy, arm) or ("source", name)."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One server at one moment.

    Attributes:
        state: as the server names it, or "stalled", "away" or "connecting".
        problem: why no sample comes now; "" while they do.
        latest: None while the server is away.
        rates: for each thing that counts, what it counted a second; empty before two samples, or if it stalled.
    """

    target: str
    state: str
    problem: str
    latest: ServerStatus | None
    rates: dict[Key, Counts]

    @property
    def load(self) -> LoadStatus | None:
        """None while the server is away, and for callers who may not see it."""
        return None if self.latest is None else self.latest.load


class Replica:
    """The samples of one server. Not thread-safe.

    Attributes:
        problem: why no sample comes now; "" while they do.
        refused: the caller may not watch it, so that trying again is of no use.
    """

    def __init__(self, target: str, interval: float) -> None:
        self.target = target
        self.problem = CONNECTING
        self.refused = False
        self._patience = max(AWAY_SECONDS, 3 * interval)
        self._arrived_at = 0.0
        self._reported_at = 0.0
        self._samples: deque[ServerStatus] = deque()

    def add_sample(self, status: ServerStatus) -> None:
        """Adds a sample. The ones before are forgotten if the server has been restarted since."""
        self.problem, self.refused = "", False
        self._arrived_at = time.monotonic()
        samples = self._samples
        if samples and status.uptime < samples[-1].uptime:
            samples.clear()
        if samples and status.uptime == samples[-1].uptime:
            samples[-1] = status  # no new figures, but perhaps another state
            return
        self._reported_at = self._arrived_at
        samples.append(status)
        while len(samples) > 2 and status.uptime - samples[1].uptime >= WINDOW_SECONDS:
            samples.popleft()

    def fail(self, problem: str, refused: bool = False) -> None:
        """No sample comes any more; those there were are no longer shown."""
        self.problem, self.refused = problem, refused
        self._samples.clear()

    @property
    def has_rates(self) -> bool:
        """There are two samples of different moments, or there will be none."""
        return len(self._samples) > 1 or self.problem not in ("", CONNECTING)

    def view(self) -> ReplicaView:
        """All that is shown of the server, as of one moment."""
        now = time.monotonic()
        if not self._samples or now - self._arrived_at > self._patience:
            connecting = self.problem == CONNECTING
            problem = self.problem or "it does not answer"
            return ReplicaView(self.target, CONNECTING if connecting else "away", problem, latest=None, rates={})
        latest = self._samples[-1]
        stalled = now - self._reported_at > STALLED_SECONDS
        state = "stalled" if stalled and latest.state == "serving" else latest.state
        return ReplicaView(self.target, state, self.problem, latest, rates={} if stalled else self._rates())

    def _rates(self) -> dict[Key, Counts]:
        if len(self._samples) < 2:
            return {}
        first, last = self._samples[0], self._samples[-1]
        seconds = last.uptime - first.uptime
        before, now = _counters(first), _counters(last)
        return {
            key: {name: max(value - before[key][name], 0.0) / seconds for name, value in counts.items()}
            for key, counts in now.items()
            if key in before
        }


def _counters(status: ServerStatus) -> dict[Key, Counts]:
    found: dict[Key, Counts] = {("tenant", one.tenant): _numbers(one) for one in status.tenants}
    load = status.load
    if load is not None:
        found[("load",)] = _numbers(load)
        found |= {("drafting", one.strategy, one.arm): _numbers(one) for one in load.drafting}
        found |= {("source", one.source): _numbers(one) for one in load.sources}
    return found


def _numbers(one: Any) -> Counts:
    values = {field.name: getattr(one, field.name) for field in fields(one)}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
