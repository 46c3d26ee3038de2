"""CPU time that other processes take while a benchmark runs: it makes figures lower and less repeatable."""

from __future__ import annotations

import os
from pathlib import Path

BUSY = 0.1
"""Share of the machine's CPU time from which the report warns. Not tuned: on two cores it is a fifth of one core."""
_PROC = Path("/proc")


class OtherLoad:
    """Counts from its creation. Processes that this one started, directly or not, are part of the benchmark."""

    def __init__(self) -> None:
        self._started = _sample()

    def share(self) -> float | None:
        """Share of the CPU time of all cores that other processes or virtual machines took, 0 to 1.

        None where there is no /proc, or less than a tick has passed.
        """
        now = _sample()
        if now is None or self._started is None or now[0] <= self._started[0]:
            return None
        total, busy, own = (after - before for after, before in zip(now, self._started, strict=True))
        return min(1.0, max(0.0, (busy - own) / total))


def warning(busy: float | None) -> str:
    """A line for the title of a table; empty if the machine had little else to do."""
    if busy is None:
        return "\nload of other processes unknown"
    if busy < BUSY:
        return ""
    return f"\nBUSY MACHINE: other processes took {busy:.0%} of the CPU time; do not rely on these figures"


def _sample() -> tuple[int, int, int] | None:
    """(all, busy, own) CPU time in ticks."""
    try:
        # user, nice, system, idle, iowait, irq, softirq, steal
        times = [int(field) for field in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return None
    return sum(times), sum(times) - times[3] - times[4], _own_ticks()


def _own_ticks() -> int:
    """CPU time of this process and its descendants, those that have ended included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))  # utime, stime, and those of reaped children
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(ticks.get(pid, 0) for pid in own)
