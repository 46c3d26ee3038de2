"""Whether a process grows: samples of what it holds, and the slope through them. For `draftwood bench soak`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from operator import attrgetter
from typing import Any

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """What the service's process and its engine's held at a time.

    Attributes:
        seconds: since the traffic began.
        rss_mib: resident memory in MiB, without the pages of files.
        threads: their threads.
        fds: their open file descriptors.
        requests: requests that its clients had under way.
    """

    seconds: float
    rss_mib: float
    threads: int
    fds: int
    requests: int


BOUNDS = {"rss_mib": 32.0, "threads": 4.0, "fds": 8.0}
"""How much each may grow from the end of the warm-up to the end of the run, if nothing else is said."""
_BINS = 12


@dataclass(frozen=True, slots=True)
class Growth:
    """How much something grew over the fitted stretch.

    Attributes:
        name: a field of `Sample`.
        start, end: the fitted line at both ends of the stretch.
        per_hour: its slope.
        bound: the growth over the stretch that is allowed.
    """

    name: str
    start: float
    end: float
    per_hour: float
    bound: float

    @property
    def within(self) -> bool:
        return self.end - self.start <= self.bound

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "within": self.within}


def growth_of(samples: Sequence[Sample], warm_up: float, bounds: Mapping[str, float] = BOUNDS) -> list[Growth]:
    """The growth of everything in `bounds`, over the samples at and after `warm_up` seconds; at least twelve of them.

    What requests under way hold comes and goes, but a leak lifts the floor. So the stretch is cut into twelve equal
    parts, and the line goes through the least sample of each: that of Theil and Sen, which one odd part does not bend.
    """
    fitted = [sample for sample in samples if sample.seconds >= warm_up]
    cuts = [len(fitted) * i // _BINS for i in range(_BINS + 1)]
    growths = []
    for name, bound in bounds.items():
        parts = [fitted[start:end] for start, end in pairwise(cuts)]
        floor = [min(part, key=attrgetter(name)) for part in parts]
        times, values = [sample.seconds for sample in floor], [float(getattr(sample, name)) for sample in floor]
        slope = theil_sen(times, values)
        level = statistics.median(value - slope * at for at, value in zip(times, values, strict=True))
        start, end = level + slope * fitted[0].seconds, level + slope * fitted[-1].seconds
        growths.append(Growth(name, round(start, 2), round(end, 2), round(3600 * slope, 3), bound))
    return growths


def theil_sen(times: Sequence[float], values: Sequence[float]) -> float:
    """The median slope between all pairs of points; `times` grow strictly."""
    points = list(zip(times, values, strict=True))
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))
