"""How often our A/B tests raise a false alarm, and how often they find a difference, by simulation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from draftwood_service.experiments.statistics.mixture import is_rejected, quantile_change
from draftwood_service.experiments.statistics.ratios import compare
from draftwood_tenants.experiments.outcomes import TIME_PER_TOKEN, TTFT, FloatArray, Metric, column
from tests.service.experiments.statistics.simulation import Looks, World, simulate

ALPHA = 0.05
LEAST_POWER = 0.8
SPEEDUP = 1.1
SESSION_LENGTH = 2.0
AA, AB = World(session_length=SESSION_LENGTH), World(speedup=SPEEDUP)

Alarm = Callable[[Looks], NDArray[np.bool]]
"""Whether a look finds a difference: bool[run, look]."""


def false_alarms(world: World, runs: int, seed: int) -> dict[str, float]:
    """Shares of the runs in which a look found a difference, or a sample-ratio mismatch ("SRM"); the arms are equal."""
    alarms: dict[str, Alarm] = {
        "mean TTFT": lambda looks: excludes_zero(looks, TTFT),
        "decode time per token": lambda looks: excludes_zero(looks, TIME_PER_TOKEN),
        "p90 of TTFT": _quantile_differs,
        "SRM": _mismatch,
    }
    return found_in(world, runs, seed, alarms)


def power(world: World, runs: int, seed: int) -> dict[str, float]:
    """Shares of the runs in which a look found that the treatment is "faster", which it is, or a mismatch ("SRM")."""
    return found_in(world, runs, seed, {"faster": _is_faster, "SRM": _mismatch})


def found_in(world: World, runs: int, seed: int, alarms: dict[str, Alarm]) -> dict[str, float]:
    """For each alarm the share of the runs in which any look raised it."""
    count = dict.fromkeys(alarms, 0)
    for looks in simulate(world, runs, seed):
        for name, alarm in alarms.items():
            count[name] += int(alarm(looks).any(axis=1).sum())
    return {name: raised / runs for name, raised in count.items()}


def excludes_zero(looks: Looks, metric: Metric) -> NDArray[np.bool]:
    """bool[run, look]: whether the confidence sequence of the change excludes 0."""
    low, high = compare(*_arms(looks.sums), metric).sequence(ALPHA)
    return (low > 0) | (high < 0)


def _is_faster(looks: Looks) -> NDArray[np.bool]:
    return compare(*_arms(looks.sums), TIME_PER_TOKEN).sequence(ALPHA)[1] < 0


def _quantile_differs(looks: Looks) -> NDArray[np.bool]:
    low, high = quantile_change(looks.ttft[:, :, 0], looks.ttft[:, :, 1], 0.9, ALPHA)
    return (low > 0) | (high < 0)


def _mismatch(looks: Looks) -> NDArray[np.bool]:
    return is_rejected(looks.sums[..., column("units")].sum(-1), np.array([0.5, 0.5]), ALPHA)


def _arms(sums: FloatArray) -> tuple[FloatArray, FloatArray]:
    return sums[:, :, 0], sums[:, :, 1]
