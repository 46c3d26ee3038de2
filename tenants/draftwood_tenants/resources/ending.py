"""Ends tasks that run beside requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

_RETRY_SECONDS = 1.0
"""Tasks end at once, but for the case that `end` describes."""


async def end(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Cancels tasks and waits until they have ended.

    Tries again, since a task misses a cancellation that arrives while one of its connections fails.
    """
    pending = {task for task in tasks if task is not None}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_RETRY_SECONDS)
