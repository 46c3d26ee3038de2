"""Counts of an experiment that merge over replicas: a state-based CRDT.

Each process counts into arrays of its own, which only it changes, and writes them as a `Snapshot` under
(replica, boot id) with a sequence number that grows. `merge` keeps the newest snapshot of each process and `total` adds
them: writing one twice, late or out of order changes nothing. A process that is killed loses what it had not written,
and counts nothing twice after a restart, because its boot id is another one.

Units are kept apart by *buckets*, groups of units by hash. All requests of a session are in one bucket on whichever
replica they run, and buckets are independent of each other; so the variance between buckets is the one clustered by
session, without keeping any session.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from draftwood_tenants.experiments.assignment import BUCKETS, UnitAssignment
from draftwood_tenants.experiments.latencies import BINS, bin_of
from draftwood_tenants.experiments.outcomes import FIELDS, FloatArray, Outcome, column

LATENCIES = ("ttft", "tpot")
"""The order of the second axis of `Counts.latencies`."""

_AUDITED, _DIFFERING = column("audited"), column("differing")
_MAX_UNITS = 65_536
"""Units that a recorder remembers; one that comes back after so many others is counted as new."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of all arms.

    Attributes:
        sums: float64[arm, bucket, field], the fields being `outcomes.FIELDS`.
        latencies: float64[arm, 2, BINS], of TTFT and of TPOT of the first answer of each unit. Only the first, because
            a confidence sequence of a quantile needs values that are independent.
    """

    sums: FloatArray
    latencies: FloatArray

    @classmethod
    def zero(cls, arms: int) -> Counts:
        return cls(np.zeros((arms, BUCKETS, len(FIELDS))), np.zeros((arms, len(LATENCIES), BINS)))

    def copy(self) -> Counts:
        return Counts(self.sums.copy(), self.latencies.copy())


@dataclass(frozen=True, slots=True)
class Origin:
    """A process that counts: its replica, and an id that is new at each start."""

    replica: str
    boot: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a process has counted up to a moment; the one with the larger `sequence` replaces the other."""

    origin: Origin
    sequence: int
    counts: Counts


State = Mapping[Origin, Snapshot]
"""The newest snapshot of each process that was seen."""


def merge(*states: State) -> dict[Origin, Snapshot]:
    """The newest snapshot of each process. Idempotent, commutative and associative."""
    newest: dict[Origin, Snapshot] = {}
    for snapshot in (one for state in states for one in state.values()):
        known = newest.get(snapshot.origin)
        if known is None or snapshot.sequence > known.sequence:
            newest[snapshot.origin] = snapshot
    return newest


def total(snapshots: Iterable[Snapshot], arms: int) -> Counts:
    """The sum over processes. Raises ValueError if a snapshot has another number of arms."""
    summed = Counts.zero(arms)
    for snapshot in snapshots:
        if snapshot.counts.sums.shape != summed.sums.shape:
            found = snapshot.counts.sums.shape
            raise ValueError(f"counts of {snapshot.origin}: shape {found}, expected {summed.sums.shape}")
        summed.sums[...] += snapshot.counts.sums
        summed.latencies[...] += snapshot.counts.latencies
    return summed


@dataclass(slots=True)
class Recorder:
    """Counts the requests of one experiment in this process. Not thread-safe.

    Attributes:
        arms: number of arms.
        measured_from: seconds since the epoch; what arrived before belongs to the burn-in and is not counted.
    """

    origin: Origin
    arms: int
    measured_from: float = 0.0
    _sequence: int = 0
    _counts: Counts = field(init=False)
    _seen: OrderedDict[tuple[str, str], _Seen] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._counts = Counts.zero(self.arms)

    def record(self, assignment: UnitAssignment, tenant: str, unit: str, outcome: Outcome) -> None:
        """Counts a finished request."""
        if outcome.arrived_at < self.measured_from:
            return
        seen = self._unit(tenant, unit)
        counts = outcome.counts(first=not seen.counted, first_error=outcome.erred and not seen.erred)
        self._counts.sums[assignment.arm, assignment.bucket] += counts
        if not outcome.erred and not seen.answered:
            self._record_latencies(assignment.arm, outcome)
        seen.counted, seen.erred, seen.answered = True, seen.erred or outcome.erred, seen.answered or not outcome.erred
        self._sequence += 1

    def record_audit(self, assignment: UnitAssignment, *, differing: bool) -> None:
        """Counts an answer that was decoded again after its request was counted."""
        sums = self._counts.sums[assignment.arm, assignment.bucket]
        sums[_AUDITED] += 1
        sums[_DIFFERING] += differing
        self._sequence += 1

    @property
    def sequence(self) -> int:
        """Of the next snapshot: it grows with each count."""
        return self._sequence

    def snapshot(self) -> Snapshot:
        """All that was counted so far, as a copy."""
        return Snapshot(self.origin, self._sequence, self._counts.copy())

    def _record_latencies(self, arm: int, outcome: Outcome) -> None:
        if outcome.ttft_seconds is not None:
            self._counts.latencies[arm, 0, bin_of(outcome.ttft_seconds)] += 1
        if outcome.tokens:
            self._counts.latencies[arm, 1, bin_of(outcome.decode_seconds / outcome.tokens)] += 1

    def _unit(self, tenant: str, unit: str) -> _Seen:
        seen = self._seen.setdefault((tenant, unit), _Seen())
        self._seen.move_to_end((tenant, unit))
        if len(self._seen) > _MAX_UNITS:
            self._seen.popitem(last=False)
        return seen


@dataclass(slots=True)
class _Seen:
    """What has been counted of a unit."""

    counted: bool = False
    erred: bool = False
    answered: bool = False
