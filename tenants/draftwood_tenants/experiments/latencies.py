"""Histograms of latencies with fixed logarithmic bins, so that those of all replicas can be added."""

from __future__ import annotations

import math

import numpy as np

from draftwood_tenants.experiments.outcomes import FloatArray

MIN_SECONDS = 1e-4
"""Upper edge of the first bin; there is nothing to compare below it."""
STEP = 1.05
"""Ratio of neighbouring edges, which is the resolution of a quantile."""
BINS = 333
"""The last bin holds all above 1,000 seconds."""

EDGES: FloatArray = MIN_SECONDS * np.power(STEP, np.arange(BINS - 1, dtype=np.float64))
"""Seconds, float64[BINS - 1]: bin i holds what is above edge i - 1 and at most edge i."""


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
