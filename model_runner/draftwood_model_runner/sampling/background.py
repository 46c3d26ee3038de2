"""Threads for what no step waits for: compiling grammars, and masks that take long."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 10
"""Below that of the engine, whose steps others wait for."""


def background_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Threads that leave the CPU to others where the system knows priorities of threads, which is on Linux."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
