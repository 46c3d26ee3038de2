"""Restarts an engine that has died, a few times and with exponential backoff. For the event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from draftwood_service.engine.bridge import EngineBridge
from draftwood_tenants.resources.follower import end

_log = structlog.get_logger(__name__)

_FIRST_DELAY = 0.5
"""Seconds before the first attempt; each further one waits four times as long."""
_STABLE_SECONDS = 600.0
"""Seconds of uptime after which the number of attempts is reset."""
_LOOK_SECONDS = 1.0


class EngineRecovery:
    """Takes over `EngineBridge.on_stopped`.

    Args:
        attempts: restarts in a row before it fails.
        set_serving: called with whether requests are served, when that changes.

    Attributes:
        failed: set after the last attempt has failed; the service then stops.
        restarts: how often the engine was restarted, in all.
    """

    def __init__(self, bridge: EngineBridge, attempts: int, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        self.failed = asyncio.Event()
        self.restarts = 0
        self._bridge = bridge
        self._attempts = attempts
        self._attempts_left = attempts
        self._set_serving = set_serving
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        self._started_at = time.monotonic()
        bridge.on_stopped = self._engine_died

    async def close(self) -> None:
        """Starts no engine any more."""
        await end(self._tasks)

    def _engine_died(self) -> None:
        task = asyncio.create_task(self._recover())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _recover(self) -> None:
        async with self._one_at_a_time:
            await self._set_serving(False)
            if time.monotonic() - self._started_at > _STABLE_SECONDS:
                self._attempts_left = self._attempts
            while self._bridge.stopped:
                if not self._attempts_left:
                    self.failed.set()
                    return
                await asyncio.sleep(_FIRST_DELAY * 4 ** (self._attempts - self._attempts_left))
                self._attempts_left -= 1
                await self._restart()
            await self._set_serving(True)

    async def _restart(self) -> None:
        try:
            await self._bridge.restart()
        except Exception as error:
            _log.error("engine cannot be restarted", left=self._attempts_left, error=f"{type(error).__name__}: {error}")
            return
        self._started_at = time.monotonic()
        self.restarts += 1
        _log.warning("engine restarted", restarts=self.restarts, left=self._attempts_left)


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
