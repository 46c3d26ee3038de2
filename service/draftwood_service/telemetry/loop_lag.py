"""How late the event loop is: what keeps it from health checks and from the streams of all requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from draftwood_tenants.resources.ending import end

_SECONDS = 0.1
"""Between two samples."""
_WINDOW = 10.0
"""Longer than most intervals of collection."""


class LoopLag:
    """Wakes up at intervals and keeps by how much it was late. For the event loop, except `longest`."""

    def __init__(self) -> None:
        self._delays: deque[float] = deque(maxlen=round(_WINDOW / _SECONDS))
        self._task = asyncio.get_running_loop().create_task(self._run())

    def longest(self) -> float:
        """Seconds, over the last 10 s. From any thread."""
        return max([*self._delays], default=0.0)

    async def close(self) -> None:
        await end([self._task])

    async def _run(self) -> None:
        while True:
            due = time.perf_counter() + _SECONDS
            await asyncio.sleep(_SECONDS)
            self._delays.append(max(time.perf_counter() - due, 0.0))
