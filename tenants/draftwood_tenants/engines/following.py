"""Tenants and experiments that a thread of its own follows, beside an engine that must not wait."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from contextlib import suppress

from draftwood_tenants.experiments.arm_assignment import ArmAssignment, target_of
from draftwood_tenants.experiments.counters import Origin
from draftwood_tenants.experiments.counting import Counting
from draftwood_tenants.experiments.outcomes import Outcome
from draftwood_tenants.followed import FollowedTenants
from draftwood_tenants.resources.ending import end

_log = logging.getLogger("draftwood")

_LAST_SECONDS = 2.0
"""For the last counts at the end of a process."""


class TenantThread:
    """Follows tenants and experiments, and writes the counts of experiments each second.

    Args:
        replica: names this process among those on the store.
    """

    def __init__(self, followed: FollowedTenants, replica: str) -> None:
        self._followed = followed
        origin = Origin(replica, secrets.token_hex(8))
        self._counting = Counting(followed.counts, origin, lambda: map(target_of, followed.catalog.experiments()))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._looked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftwood tenants", daemon=True)

    def start(self, seconds: float) -> None:
        """Follows from now on. Waits until the store was looked at once, for so many seconds at most."""
        self._thread.start()
        self._looked.wait(seconds)

    def record(self, assignment: ArmAssignment, outcome: Outcome) -> None:
        """Counts a request. For any thread; returns at once."""
        with suppress(RuntimeError):  # the thread has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._counting.record, assignment, outcome)

    def close(self) -> None:
        """Writes what is counted, and ends. Blocks for seconds at most."""
        with suppress(RuntimeError):
            if self._loop is not None and self._stop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(3 * _LAST_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._follow())
        except Exception:
            _log.exception("tenants and experiments are not followed any more; what is known of them stays in use")
        finally:
            self._looked.set()

    async def _follow(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        writing: asyncio.Task[None] | None = None
        try:
            await self._followed.start()
            writing = asyncio.create_task(self._counting.follow())
            self._looked.set()
            await self._stop.wait()
        finally:
            await end([writing])
            await asyncio.wait([asyncio.create_task(self._counting.write())], timeout=_LAST_SECONDS)
            await self._followed.close()
