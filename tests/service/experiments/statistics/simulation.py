"""Simulated experiments: many runs at once, each read at equal distances while it grows.

The noise is that of the bundled model: 140 questions, 4 clients, hybrid strategy. The decode time per token had a
coefficient of variation of 0.48 over requests, TTFT one of 0.41, the length 0.16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from draftwood_service.experiments.statistics.ratios import Change
from draftwood_tenants.experiments.assignment import BUCKETS
from draftwood_tenants.experiments.latencies import BINS, EDGES
from draftwood_tenants.experiments.outcomes import FIELDS, FloatArray, column

LOOKS = 20
TPOT_SECONDS, TPOT_VARIATION = 0.0029, 0.5
TTFT_SECONDS, TTFT_VARIATION = 0.017, 0.41
TOKENS, TOKENS_VARIATION = 90.0, 0.16
PROMPT_EFFECT = 0.2
"""Standard deviation of log TTFT that is explained by the prompt's length."""
SESSION_SHARE = 0.5
"""Share of the variance of log TPOT that the requests of a session have in common."""
_AT_ONCE = 40
"""Runs that are simulated at once; affects memory only."""


@dataclass(frozen=True, slots=True)
class World:
    """What the arms differ in.

    Attributes:
        requests: in both arms together.
        session_length: mean requests of a session; 1.0 if the request is the unit.
        speedup: tokens per second of the treatment over those of the control.
    """

    requests: int = 2000
    session_length: float = 1.0
    speedup: float = 1.0


@dataclass(frozen=True, slots=True)
class Looks:
    """What is known of the runs at each look.

    Attributes:
        sums: float64[run, look, arm, bucket, field].
        ttft: float64[run, look, arm, BINS], of the first request of each session.
    """

    sums: FloatArray
    ttft: FloatArray


def simulate(world: World, runs: int, seed: int) -> Iterator[Looks]:
    """The runs, some at a time."""
    random = np.random.default_rng(seed)
    for begin in range(0, runs, _AT_ONCE):
        yield _simulate(world, min(_AT_ONCE, runs - begin), random)


def _simulate(world: World, runs: int, random: np.random.Generator) -> Looks:
    shape = (runs, world.requests)
    first = random.random(shape) < 1.0 / world.session_length
    first[:, 0] = True
    session = np.cumsum(first, axis=1) - 1

    def per_session(values: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.take_along_axis(values, session, axis=1)

    arm = per_session(random.integers(2, size=shape)).astype(np.int64)
    bucket = per_session(random.integers(BUCKETS, size=shape)).astype(np.int64)
    common = per_session(random.standard_normal(shape)).astype(np.float64)
    noise = SESSION_SHARE**0.5 * common + (1 - SESSION_SHARE) ** 0.5 * random.standard_normal(shape)
    prompt = random.standard_normal(shape)
    tokens = np.maximum(np.rint(_lognormal(TOKENS, TOKENS_VARIATION, random.standard_normal(shape))), 1.0)
    ttft_noise = random.standard_normal(shape)
    ttft = _lognormal(TTFT_SECONDS, TTFT_VARIATION, ttft_noise) * np.exp(PROMPT_EFFECT * prompt)
    tpot = _lognormal(TPOT_SECONDS, TPOT_VARIATION, noise) / np.where(arm == 1, world.speedup, 1.0)
    counted = {
        "requests": np.ones(shape),
        "answered": np.ones(shape),
        "units": first.astype(np.float64),
        "tokens": tokens,
        "decode_seconds": tpot * tokens,
        "ttft_seconds": ttft,
        "timed": np.ones(shape),
        "log_prompt_tokens": 4.0 + prompt,
    }
    look = np.broadcast_to(np.arange(world.requests) * LOOKS // world.requests, shape)
    group = (np.arange(runs)[:, None] * LOOKS + look) * 2 + arm
    sums = np.zeros((runs, LOOKS, 2, BUCKETS, len(FIELDS)))
    for name, values in counted.items():
        sums[..., column(name)] = _binned(group * BUCKETS + bucket, values, sums.shape[:-1])
    bins = np.searchsorted(EDGES, ttft, side="left")
    histogram = _binned(group * BINS + bins, counted["units"], (runs, LOOKS, 2, BINS))
    return Looks(np.cumsum(sums, axis=1), np.cumsum(histogram, axis=1))


def _lognormal(mean: float, variation: float, normal: FloatArray) -> FloatArray:
    """Values with this mean and coefficient of variation, from standard normal ones."""
    spread = np.log1p(variation**2)
    values: FloatArray = mean * np.exp(np.sqrt(spread) * normal - spread / 2)
    return values


def _binned(cells: NDArray[np.int64], values: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Sums of the values of each cell of an array of this shape."""
    binned: FloatArray = np.bincount(cells.ravel(), values.ravel(), minlength=math.prod(shape)).astype(np.float64)
    return binned.reshape(shape)


def fixed_bounds(change: Change, alpha: float) -> tuple[FloatArray, FloatArray]:
    """Bounds float64[...] for a single look at a size that was set in advance."""
    radius = NormalDist().inv_cdf(1.0 - alpha / 2) * np.sqrt(change.variance)
    return change.log_ratio - radius, change.log_ratio + radius
