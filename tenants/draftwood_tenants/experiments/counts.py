"""What is counted of a request, and counts of an experiment that merge over replicas: a state-based CRDT.

Each process counts into arrays of its own, which only it changes, and writes them as a `Snapshot` under
(replica, boot id) with a sequence number that grows. `merge` keeps the newest snapshot of each process and `total` adds
them: writing one twice, late or out of order changes nothing. A process that is killed loses what it had not written,
and counts nothing twice after a restart, because its boot id is another one.

Units are kept apart by *buckets*, groups of units by hash. All requests of a session are in one bucket on whichever
replica they run, and buckets are independent of each other; so the variance between buckets is the one clustered by
session, without keeping any session. Latencies go into histograms with fixed logarithmic bins, so that those of all
replicas can be added.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftwood_tenants.experiments.assignment import BUCKETS, UnitAssignment

FloatArray = NDArray[np.float64]

FIELDS = (
    "requests", "answered", "units", "erred_units", "tokens", "steps", "decode_seconds", "ttft_seconds",
    "draft_nodes", "accepted_tokens", "audited", "differing", "timed",
)  # fmt: skip
"""The counts, in the order of the last axis of `Counts.sums`. Times and tokens are of answered requests;
`timed` counts those of them with a TTFT."""
MIN_SECONDS = 1e-4
"""Upper edge of the first bin; there is nothing to compare below it."""
STEP = 1.05
"""Ratio of neighbouring edges, which is the resolution of a quantile."""
BINS = 333
"""The last bin holds all above 1,000 seconds."""
EDGES: FloatArray = MIN_SECONDS * np.power(STEP, np.arange(BINS - 1, dtype=np.float64))
"""Seconds, float64[BINS - 1]: bin i holds what is above edge i - 1 and at most edge i."""
LATENCIES = ("ttft", "tpot")
"""The order of the second axis of `Counts.latencies`."""
_MAX_UNITS = 65_536
"""Units that a recorder remembers; one that comes back after so many others is counted as new."""


def column(name: str) -> int:
    """The position of a count on the last axis."""
    return FIELDS.index(name)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished request.

    Attributes:
        arrived_at: seconds since the epoch.
        erred: ended with an error that the caller did not cause. Its times and tokens are not counted.
        tokens: tokens written in decoding steps, the first one, which is the prefill's, not among them.
        steps: decoding steps.
        decode_seconds: time from the first token to the last.
        ttft_seconds: time from arrival to the first token; None where the process that counts cannot know it.
        draft_nodes, accepted_tokens: draft tokens that were verified and accepted.
    """

    arrived_at: float
    erred: bool = False
    tokens: int = 0
    steps: int = 0
    decode_seconds: float = 0.0
    ttft_seconds: float | None = None
    draft_nodes: int = 0
    accepted_tokens: int = 0

    def counts(self, *, first: bool, first_error: bool) -> FloatArray:
        """float64[len(FIELDS)], audits not among them; `first` and `first_error`: it is the first request, or error, of
        its unit."""
        answered = not self.erred
        timed = answered and self.ttft_seconds is not None
        times = (
            self.tokens,
            self.steps,
            self.decode_seconds,
            self.ttft_seconds or 0.0,
            self.draft_nodes,
            self.accepted_tokens,
        )
        return np.array(
            [1, answered, first, first_error, *(answered * value for value in times), 0, 0, timed], np.float64
        )


@dataclass(frozen=True, slots=True)
class Metric:
    """A sum of one count over the sum of another.

    Attributes:
        title: what a reader calls it.
        key: what programs call it, in reports; never changes.
        more_is_better: whether an arm with a larger value is the better one.
    """

    title: str
    key: str
    numerator: str
    denominator: str
    more_is_better: bool = False


TIME_PER_TOKEN = Metric("decode time per token", "decode_seconds_per_token", "decode_seconds", "tokens")
TTFT = Metric("mean time to first token", "ttft_seconds_mean", "ttft_seconds", "timed")
TOKENS_PER_STEP = Metric("tokens per step", "tokens_per_step", "tokens", "steps", more_is_better=True)
NODES_PER_ACCEPTED = Metric(
    "draft nodes per accepted token", "draft_nodes_per_accepted_token", "draft_nodes", "accepted_tokens"
)
METRICS = (TIME_PER_TOKEN, TTFT, TOKENS_PER_STEP, NODES_PER_ACCEPTED)
"""The first one decides an experiment; the others explain it."""


def bin_of(seconds: float) -> int:
    """The bin of a latency."""
    return int(np.searchsorted(EDGES, seconds, side="left"))


def quantile(histogram: FloatArray, probability: float) -> float:
    """The upper edge of the bin of the quantile, in seconds; nan for an empty histogram float64[BINS]."""
    total = histogram.sum()
    if not total:
        return math.nan
    at = int(np.searchsorted(np.cumsum(histogram), probability * total, side="left"))
    return float(EDGES[at]) if at < len(EDGES) else math.inf


_AUDITED, _DIFFERING = column("audited"), column("differing")


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of all arms.

    Attributes:
        sums: float64[arm, bucket, field], the fields being `FIELDS`.
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
    for snapshot in (snapshot for state in states for snapshot in state.values()):
        known = newest.get(snapshot.origin)
        if known is None or snapshot.sequence > known.sequence:
            newest[snapshot.origin] = snapshot
    return newest


def total(snapshots: Iterable[Snapshot], arms: int) -> Counts:
    """The sum over processes. Raises ValueError if a snapshot has another number of arms."""
    summed = Counts.zero(arms)
    for snapshot in snapshots:
        if snapshot.counts.sums.shape != summed.sums.shape:
            shape = snapshot.counts.sums.shape
            raise ValueError(f"counts of {snapshot.origin}: shape {shape}, expected {summed.sums.shape}")
        summed.sums[...] += snapshot.counts.sums
        summed.latencies[...] += snapshot.counts.latencies
    return summed


@dataclass(slots=True)
class Recorder:
    """Counts the requests of one experiment in this process. Not thread-safe.

    Attributes:
        arms: number of arms.
        measured_from: seconds since the epoch; what arrived before belongs to the burn-in and is not counted.
        sequence: of the next snapshot; it grows with each count.
    """

    origin: Origin
    arms: int
    measured_from: float = 0.0
    sequence: int = 0
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
        self.sequence += 1

    def record_audit(self, assignment: UnitAssignment, *, differing: bool) -> None:
        """Counts an answer that was decoded again after its request was counted."""
        sums = self._counts.sums[assignment.arm, assignment.bucket]
        sums[_AUDITED] += 1
        sums[_DIFFERING] += differing
        self.sequence += 1

    def snapshot(self) -> Snapshot:
        """All that was counted so far, as a copy."""
        return Snapshot(self.origin, self.sequence, self._counts.copy())

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
