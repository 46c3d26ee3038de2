"""Whether the engine still makes steps: one that hangs sends no reports, and does not end by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from draftwood_service.engine.bridge import EngineBridge
from draftwood_tenants.resources.ending import end

_log = structlog.get_logger(__name__)

_LOOK_SECONDS = 1.0


class EngineLiveness:
    """Looks for a hanging engine. One that has died is no matter of this: it is started anew, or the process ends.

    Args:
        stall_seconds: without a report after which the engine counts as hanging; a step may take long.
        set_alive: called with whether it works, when that changes.
    """

    def __init__(
        self, bridge: EngineBridge, stall_seconds: float, set_alive: Callable[[bool], Awaitable[None]]
    ) -> None:
        self._bridge = bridge
        self._stall_seconds = stall_seconds
        self._set_alive = set_alive
        self._alive = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await end([self._task])

    async def _run(self) -> None:
        while True:
            silent = time.monotonic() - self._bridge.reports.at
            alive = self._bridge.stopped or silent < self._stall_seconds
            if alive != self._alive:
                self._alive = alive
                log = _log.info if alive else _log.error
                log("engine works again" if alive else "engine hangs", silent_seconds=round(silent, 1))
                await self._set_alive(alive)
            await asyncio.sleep(min(_LOOK_SECONDS, self._stall_seconds / 4))
