"""How many CPUs this process may use: those it may run on, within the CPU quota of its container. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from draftwood_strategies.arrays import Int32Array

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


LEAST_NUMBERS = 1 << 19
"""Of logits in all rows, from which on threads pay: 2 MiB take one thread 50 us, a call in another thread 30."""
_MOST = 16
"""More threads than this wait for each other."""
_NODES_TO_DRAFT = 1024
"""A thread for a group of sequences pays from this budget of the group on: the trie takes some 0.15 us a node, and a
second thread 30 to 90 us."""

Result = TypeVar("Result")


def in_threads(calls: Sequence[Callable[[], Result]], threads: int) -> list[Result]:
    """What the calls return, in their order; they run in this thread and in up to `threads - 1` others.

    They should be few, about as many as threads: handing one over takes some 30 us. Raises what the first one that
    fails raised, once all have ended.
    """
    if threads < 2 or len(calls) < 2:
        return [call() for call in calls]
    pool, others = _pool(min(threads, _MOST) - 1), list[Future[Result]]()
    try:
        others.extend(pool.submit(call) for call in calls[1:])
        first = calls[0]()
    finally:
        _wait_for(others)
    return [first, *(other.result() for other in others)]


def _wait_for(others: Sequence[Future[Any]]) -> None:
    """Until all have ended, also if a signal interrupts it (`Watchdog`): they work on what the caller may free or
    change afterwards."""
    try:
        for other in others:
            other.exception()
    except BaseException:
        _wait_for(others)
        raise


def parts(count: int, threads: int) -> list[range]:
    """0 to `count` in as many ranges as threads, of about equal size, none empty."""
    wanted = max(1, min(count, threads, _MOST))
    edges = [count * i // wanted for i in range(wanted + 1)]
    return [range(begin, end) for begin, end in pairwise(edges)]


def draft_in_threads(budgets: Int32Array, draft: Callable[[range], Result]) -> list[tuple[range, Result]]:
    """Consecutive sequences of a step, in their order, with what `draft` returns for them: all at once, or in several
    groups, each in a thread, where there is enough to draft.

    Args:
        budgets: int32[s], the most nodes of each draft.
        draft: changes nothing but what these sequences have to themselves, and what its thread has.
    """
    threads = _usable_cpus()
    groups = parts(budgets.shape[0], min(threads, int(budgets.sum()) // _NODES_TO_DRAFT))
    return [*zip(groups, in_threads([partial(draft, group) for group in groups], threads), strict=True)]


_usable_cpus = cache(usable_cpus)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept for the life of the process: it is used in every step."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")
