"""Whether the engine still makes steps: one that hangs sends no reports, and does not end by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from draftwood_service.engine.bridge import EngineBridge

_log = structlog.get_logger(__name__)

_LOOK_SECONDS = 1.0


async def follow_liveness(
    bridge: EngineBridge, stall_seconds: float, set_alive: Callable[[bool], Awaitable[None]]
) -> None:
    """Looks for a hanging engine, until it is cancelled. One that has died is restarted
    elsewhere (`recovery`), or the process ends.

    Args:
        stall_seconds: without a report after which the engine counts as hanging; a step may take long.
        set_alive: called with whether it works, when that changes.
    """
    was_alive = True
    while True:
        silent = time.monotonic() - bridge.reports.at
        alive = bridge.stopped or silent < stall_seconds
        if alive != was_alive:
            was_alive = alive
            log = _log.info if alive else _log.error
            log("engine works again" if alive else "engine hangs", silent_seconds=round(silent, 1))
            await set_alive(alive)
        await asyncio.sleep(min(_LOOK_SECONDS, stall_seconds / 4))
