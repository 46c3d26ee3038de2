"""How many CPUs this process may use: those it may run on, within the CPU quota of its container. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_V1 = ("cpu", "cpu,cpuacct")
"""Folders of the CPU controller in version 1."""


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """At least 1. A quota of 2.5 CPUs counts as 2.

    Args:
        cgroup: where the control group of this process is mounted, of version 1 or 2.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(math.floor(quota) for quota in _quotas(cgroup))]))


def _quotas(cgroup: Path) -> Iterator[float]:
    """CPUs by each quota that is set."""
    for limit, period in _limits(cgroup):
        if limit.lstrip("-").isdigit() and int(limit) > 0 and int(period) > 0:  # version 2 says max, version 1 -1
            yield int(limit) / int(period)


def _limits(cgroup: Path) -> Iterator[tuple[str, str]]:
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        yield limit, period
    except (OSError, ValueError):
        pass
    for folder in _V1:
        try:
            limit = (cgroup / folder / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            continue
        yield limit, period
