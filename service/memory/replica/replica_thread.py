"""The thread that a replica lives on, with an event loop of its own: whatever the store does, nobody waits for it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from service.memory.errors import MemoryStoreError, StoreUnavailableError
from service.memory.replica.replica import Replica

_log = structlog.get_logger(__name__)

ROUND_SECONDS = 0.2
"""Between two rounds; a record takes two of them, and the store's own time, from one process to another."""
_QUIET_SECONDS = 1.0
_LONGEST_BACKOFF = 5.0
_SLOW_SECONDS = 0.3

Result = TypeVar("Result")


class ReplicaThread:
    """Calls a replica's rounds until it is stopped, more slowly while the store fails.

    Args:
        seconds: between two rounds.
    """

    def __init__(self, replica: Replica, seconds: float = ROUND_SECONDS) -> None:
        self._replica = replica
        self._seconds = seconds
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._lock = asyncio.Lock()
        self._awake = asyncio.Event()
        self._ending = asyncio.Event()
        self._failed = 0
        self._round_since: float | None = None
        self._stopped = False

    @property
    def healthy(self) -> bool:
        """The store answered in the latest round, and does not make the present one wait."""
        since = self._round_since
        in_time = since is None or time.monotonic() - since < _SLOW_SECONDS
        return not self._failed and self._thread.is_alive() and in_time

    @property
    def failing(self) -> bool:
        """The latest round with the store failed."""
        return self._failed > 0

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Lets the next round begin now. From any thread."""
        if not self._failed:
            self._call(self._awake.set)

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Runs `work` between two rounds. From any thread.

        Raises:
            StoreUnavailableError: from the future, where the thread has stopped.
        """

        async def alone() -> Result:
            async with self._lock:
                return await work

        if self._stopped or not self._thread.is_alive():
            work.close()
            failed: Future[Result] = Future()
            failed.set_exception(StoreUnavailableError("the memory has stopped"))
            return failed
        return asyncio.run_coroutine_threadsafe(alone(), self._loop)

    def stop(self, seconds: float) -> bool:
        """Sends what was learned, for so long at most, and ends the thread. Returns whether it ended in time."""
        self._stopped = True
        if self._thread.ident is None:
            self._loop.close()
            return True
        self._call(self._ending.set)
        self._call(self._awake.set)
        self._thread.join(seconds + 1.0)
        return not self._thread.is_alive()

    def _call(self, callback: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception:
            self._failed += 1
            _log.exception("the memory's thread died; what tenants teach stays in this process")
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _main(self) -> None:
        while not self._ending.is_set():
            await self._round()
            await self._wait()
        await self._last_round()
        await self._replica.store.close()

    async def _round(self) -> None:
        self._awake.clear()
        counters = self._replica.counters
        self._round_since = time.monotonic()
        try:
            async with self._lock:
                await self._replica.round()
        except MemoryStoreError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("a round with the memory's store failed")
            self._fail(error)
        else:
            if self._failed:
                counters.reconnects += 1
                _log.info("the memory's store answers again", failures=self._failed)
            self._failed = 0
            counters.last_contact = time.monotonic()
        self._round_since = None

    def _fail(self, error: Exception) -> None:
        self._replica.counters.failures += 1
        if not self._failed:
            _log.warning("the memory's store fails; generation goes on without it", why=str(error))
        self._failed += 1

    async def _wait(self) -> None:
        shared = self._replica.store.shared
        seconds = self._seconds if shared or self._replica.outbox.pending else _QUIET_SECONDS
        if self._failed:
            seconds = min(_LONGEST_BACKOFF, self._seconds * 2 ** min(self._failed, 10)) * random.uniform(0.5, 1.0)
        try:
            async with asyncio.timeout(seconds):
                await (self._ending if self._failed else self._awake).wait()
        except TimeoutError:
            pass

    async def _last_round(self) -> None:
        try:
            async with asyncio.timeout(2.0):
                await self._replica.round()
        except (MemoryStoreError, TimeoutError):
            left = self._replica.outbox.pending
            if left:
                _log.warning("what was taught last could not be stored", records=left)
