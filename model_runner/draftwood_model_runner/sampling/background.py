"""Threads for what no step waits for: compiling grammars, and masks that take long."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 10
"""Lower than the priority of the engine, as all requests wait for its steps."""


def background_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Threads of low priority on Linux; other systems know no priorities of threads."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
