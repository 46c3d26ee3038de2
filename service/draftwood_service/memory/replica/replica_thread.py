"""The memory thread: an event loop for a replica's rounds and for operations, so that requests need not wait."""

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

from draftwood_service.memory.config import ROUND_SECONDS
from draftwood_service.memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_service.memory.replica.replica import Replica

_log = structlog.get_logger(__name__)

_QUIET_SECONDS = 1.0
"""Between two rounds with a store that no other process writes to, while the outbox is empty. Not tuned."""
_MAX_BACKOFF = 5.0
"""Between two rounds at most while the store fails; the pause doubles from `ROUND_SECONDS` with a random factor of 0.5
to 1, so that replicas do not return together. Not tuned."""
_SLOW_SECONDS = 0.3
"""A round that takes longer counts as a failing store: first requests of a tenant then do not wait for it. Not tuned:
a round without a fold takes milliseconds."""
_LAST_ROUND_SECONDS = 4.0
"""For sending the outbox at the stop. It must fit into the quarter of the default `drain_grace` that follows the
streams. Not tuned beyond that."""

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
        self._awake = asyncio.Event()
        self._ending = asyncio.Event()
        self._failures = 0
        self._round_since: float | None = None
        self._stopped = False

    @property
    def healthy(self) -> bool:
        """The latest round succeeded, and the present one does not take long."""
        since = self._round_since
        in_time = since is None or time.monotonic() - since < _SLOW_SECONDS
        return not self._failures and self._thread.is_alive() and in_time

    @property
    def failing(self) -> bool:
        """The latest round with the store failed."""
        return self._failures > 0

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Starts the next round now, unless the store fails. From any thread."""
        if not self._failures:
            self._call(self._awake.set)

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Runs `work` on the thread, beside the rounds; it takes `Replica.lock` for what must not overlap with one.

        From any thread. The future's callbacks run on the memory thread. It is cancelled if the thread stops before
        `work` ends.

        Raises:
            StoreUnavailableError: from the future, if the thread has stopped.
        """
        if self._stopped or not self._thread.is_alive():
            work.close()
            failed: Future[Result] = Future()
            failed.set_exception(StoreUnavailableError("the memory thread has stopped"))
            return failed
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, seconds: float) -> bool:
        """Sends the outbox, for so long at most, and ends the thread. Returns whether it ended in time."""
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
            self._failures += 1
            _log.exception("memory thread died; learned sequences stay in this process")
        finally:
            self._loop.run_until_complete(_cancel_others())
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
        self._round_since = time.monotonic()
        try:
            async with self._replica.lock:
                await self._replica.round()
        except MemoryStoreError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("round with the memory store failed")
            self._fail(error)
        else:
            if self._failures:
                self._replica.counters.reconnects += 1
                _log.info("memory store answers again", failures=self._failures)
            self._failures = 0
        self._round_since = None

    def _fail(self, error: Exception) -> None:
        self._replica.counters.failures += 1
        if not self._failures:
            _log.warning("memory store failed; generation goes on without it", why=str(error))
        self._failures += 1

    async def _wait(self) -> None:
        shared = self._replica.store.shared
        seconds = self._seconds if shared or self._replica.outbox.pending else _QUIET_SECONDS
        if self._failures:
            seconds = min(_MAX_BACKOFF, self._seconds * 2 ** min(self._failures, 10)) * random.uniform(0.5, 1.0)
        try:
            async with asyncio.timeout(seconds):
                await (self._ending if self._failures else self._awake).wait()
        except TimeoutError:
            pass

    async def _last_round(self) -> None:
        """Sends the outbox; while the store fails, again and again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ROUND_SECONDS):
                await self._round()
                while self._replica.outbox.pending:
                    await asyncio.sleep(self._seconds)
                    await self._round()
        if left := self._replica.outbox.pending:
            _log.warning("last learned sequences were not stored", records=left)


async def _cancel_others() -> None:
    """Cancels the operations that still run when the thread ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
