"""Resident memory of a service's processes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

MIB = 1024 * 1024


def resident_mib(pid: int) -> float:
    """MiB of a process and its children, see `own_bytes`; those that end meanwhile are left out."""
    import psutil

    total = 0
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += own_bytes(one.memory_info())
    return total / MIB


def own_bytes(memory: Any) -> int:
    """Resident bytes without file-backed pages, which the operating system evicts and reloads as it likes.

    Args:
        memory: of `psutil.Process.memory_info`; without a `shared` field, all resident bytes count.
    """
    return int(memory.rss - getattr(memory, "shared", 0))
