"""Growth of a process over time: samples of memory, threads and file descriptors, and a robust line through them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from scipy.stats import theilslopes


class Sample(NamedTuple):
    """What the service's process and its children hold after some seconds of traffic, and the requests under way."""

    seconds: float
    rss_mib: float  # resident memory without file-backed pages
    threads: int
    fds: int
    requests: int


WARM_UP = 0.5
"""Share of the time in which growth does not count: caches and memories fill."""
BOUNDS = {"rss_mib": 32.0, "threads": 4.0, "fds": 8.0}
"""Default bounds of the growth from the end of the warm-up to the end of the run: MiB, threads, file descriptors."""
_BINS = 12
"""Parts that the fitted samples are cut into; any number works that leaves several samples in each part."""


class Growth(NamedTuple):
    """The line fitted to one resource, a field of `Sample`.

    Attributes:
        start, end: its values at the first and at the last sample.
        bound: the largest `end - start` that is accepted.
    """

    name: str
    start: float
    end: float
    per_hour: float
    bound: float

    @property
    def within(self) -> bool:
        return self.end - self.start <= self.bound


def growth_of(samples: Sequence[Sample], warm_up: float, memory_bound: float = BOUNDS["rss_mib"]) -> list[Growth]:
    """The growth of each resource in `BOUNDS`, over the samples from `warm_up` seconds on; at least `_BINS` of them.

    Requests under way hold resources for a while; a leak lifts the floor. So the samples are cut into `_BINS` equal
    parts, and a line is fitted through the least sample of each by the Theil-Sen estimator, robust to outliers.
    """
    fitted = [sample for sample in samples if sample.seconds >= warm_up]
    cuts = [len(fitted) * i // _BINS for i in range(_BINS + 1)]
    growths = []
    for name, bound in {**BOUNDS, "rss_mib": memory_bound}.items():
        parts = [fitted[start:end] for start, end in pairwise(cuts)]
        floor = [min(part, key=attrgetter(name)) for part in parts]
        times, values = [sample.seconds for sample in floor], [float(getattr(sample, name)) for sample in floor]
        slope, level, *_ = map(float, theilslopes(values, times, method="joint"))
        start, end = level + slope * fitted[0].seconds, level + slope * fitted[-1].seconds
        growths.append(Growth(name, round(start, 2), round(end, 2), round(3600 * slope, 3), bound))
    return growths
