"""The memory thread: an event loop that loads, sends and follows memories, and runs operations.

Three tasks share it. The rounds load what requests ask for and send the outbox, as soon as there is something to do.
The others follow what other processes write, see `replica.Follower`, and look for purges.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from draftwood_memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_memory.records import LoggedRecord
from draftwood_memory.replica import Follower, Replica
from draftwood_memory.resident import Resident
from draftwood_memory.residents import Process
from draftwood_memory.store.naming import MemoryName
from draftwood_memory.store.purges import SEE_SECONDS

_log = logging.getLogger(__name__)

_ROUND_SECONDS = 1.0
"""Between two rounds while nothing is asked for: they evict memories and drop records that are too old."""
_PUSH_SECONDS = 0.02
"""Between two round trips that send the outbox: what is learned meanwhile goes in one entry. It is the
larger part of the lag between replicas."""
_CHECK_SECONDS = 30.0
"""Interval in which memories in use are compared with the store's, besides after failures: a connection that broke
while idle is replaced without a failure."""
_MAX_BACKOFF = 5.0
"""Between two rounds at most while the store fails; the pause doubles from a fifth of a second with a random factor of
0.5 to 1, so that replicas do not return together."""
_SLOW_SECONDS = 0.3
"""A round that takes longer counts as a failing store: first requests of a tenant then do not wait for it.
A round takes milliseconds."""
_LAST_ROUND_SECONDS = 4.0
"""For sending the outbox at the stop. It must fit into the quarter of the default `drain_grace` that follows the
streams."""

Result = TypeVar("Result")
_NOTE_SECONDS = 60.0
"""Between two notes of which kind of memories this process uses. Memories are orphans after an hour."""
_EVICT_SECONDS = 1.0
"""Between two evictions. It bounds how long surplus memories stay."""


class MemoryThread:
    """Runs until it is stopped.

    Args:
        replica: None without a store; the thread then only evicts memories and runs operations.
        maintenance: runs in every round.

    Attributes:
        follower: None without a store.
    """

    def __init__(self, process: Process, replica: Replica | None, maintenance: Maintenance) -> None:
        self._replica = replica
        self._outbox, self._counters = process.outbox, process.counters
        self._maintenance = maintenance
        self.follower = None if replica is None else Follower(replica, process)
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._awake = asyncio.Event()
        self._ending = asyncio.Event()
        self._healthy = asyncio.Event()
        self._failures = 0
        self._check_all = False
        self._checked_at = time.monotonic()
        self._round_since: float | None = None
        self._pushed_at = -_PUSH_SECONDS
        self._stopped = False
        process.between_steps.on_learned = self.wake

    @property
    def healthy(self) -> bool:
        """The latest call to the store succeeded, and the present round does not take long."""
        since = self._round_since
        in_time = since is None or time.monotonic() - since < _SLOW_SECONDS
        return not self._failures and self._thread.is_alive() and in_time

    @property
    def failing(self) -> bool:
        """The latest call to the store failed."""
        return self._failures > 0

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def wake(self) -> None:
        """Starts the next round now, unless the store fails. From any thread."""
        if not self._failures and not self._awake.is_set():
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
        """Sends the outbox for at most `seconds`, and ends the thread. Returns whether it ended in time."""
        self._stopped = True
        if self._thread.ident is None:
            return True
        self._call(self._ending.set)
        self._call(self._awake.set)
        self._thread.join(seconds + 1.0)
        return not self._thread.is_alive()

    def _call(self, callback: Callable[[], object]) -> None:
        if self._thread.ident is not None:
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
            self._loop.close()

    async def _main(self) -> None:
        following: list[asyncio.Task[None]] = []
        if self._replica is not None and self.follower is not None:
            following += [asyncio.create_task(self._follow(self.follower))]
            following += [asyncio.create_task(self._see_purges(self._replica))]
        while not self._ending.is_set():
            await self._round()
            await self._pause()
        if self._replica is None:
            return
        for task in following:
            task.cancel()
        ends_at = time.monotonic() + _LAST_ROUND_SECONDS
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ROUND_SECONDS):
                while self._outbox.pending and time.monotonic() < ends_at:  # the Redis library may lose a cancellation
                    self._pushed_at = -_PUSH_SECONDS
                    await self._round()
                    await asyncio.sleep(_PUSH_SECONDS if not self._failures else 0.2)
        if left := self._outbox.pending:
            _log.warning("last learned sequences were not stored: %d", left)
        while running := [task for task in following if not task.done()]:  # as above
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=0.05)
        with suppress(MemoryStoreError):
            await self._replica.purges.leave()
        await self._replica.memories.client.close()

    async def _round(self) -> None:
        self._awake.clear()
        self._round_since = time.monotonic()
        try:
            if self._replica is not None:
                async with self._replica.lock:
                    await self._with_store(self._replica)
        except MemoryStoreError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("round with the memory store failed")
            self._fail(error)
        else:
            if self._failures:
                self._counters.reconnects += 1
                _log.info("memory store answers again after %d failures", self._failures)
            self._failures = 0
            self._healthy.set()
        finally:
            self._round_since = None
            await self._maintenance.run(self.failing)

    async def _with_store(self, replica: Replica) -> None:
        now = time.monotonic()
        await replica.apply_purges()
        if self._check_all or now - self._checked_at > _CHECK_SECONDS:
            await replica.records.free_space()  # what is checked may be restored, which a full store refuses
            await replica.check(live_only=not self._check_all)
            self._check_all, self._checked_at = False, now
        await replica.load()
        if self._outbox.pending:
            if now - self._pushed_at >= _PUSH_SECONDS:
                self._pushed_at = now
                await replica.sender.push()
            else:
                self._loop.call_later(self._pushed_at + _PUSH_SECONDS - now, self._awake.set)
        if self.follower is not None:
            await self.follower.wake()

    def _fail(self, error: Exception) -> None:
        self._counters.failures += 1
        if not self._failures:
            _log.warning("memory store failed; generation goes on without it: %s", error)
        self._failures += 1
        self._check_all = True
        self._healthy.clear()

    async def _pause(self) -> None:
        seconds = _ROUND_SECONDS
        if self._failures:
            seconds = min(_MAX_BACKOFF, 0.2 * 2 ** min(self._failures - 1, 10)) * random.uniform(0.5, 1.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (self._ending if self._failures else self._awake).wait()

    async def _follow(self, follower: Follower) -> None:
        try:
            await self._repeat(follower.follow)
        finally:
            await follower.close()

    async def _see_purges(self, replica: Replica) -> None:
        async def see() -> None:
            await asyncio.sleep(SEE_SECONDS)
            async with replica.lock:
                await replica.apply_purges()

        await self._repeat(see)

    async def _repeat(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """While the store answers."""
        while True:
            await self._healthy.wait()
            try:
                await work()
            except MemoryStoreError as error:
                self._fail(error)
            except Exception as error:
                _log.exception("memories cannot be followed")
                self._fail(error)


async def _cancel_others() -> None:
    """Cancels the operations that still run when the thread ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Maintenance:
    """Runs on the memory thread, but for `forget_if_lapsed`.

    Args:
        replica: None without a store.
    """

    def __init__(self, process: Process, replica: Replica | None) -> None:
        self._process = process
        self._residents = process.residents
        self._replica = replica
        self._forgot = False
        self._noted_at = self._evicted_at = -float("inf")

    async def run(self, failing: bool) -> None:
        """A round.

        Args:
            failing: the latest call to the store failed.
        """
        now = time.monotonic()
        replica = None if failing else self._replica
        self.forget_if_lapsed()
        for resident in self._residents.all():
            if self._replica is None and resident.unbuilt:
                self._fork(resident)
                resident.build([*resident.unbuilt])
            if resident.expired:
                resident.reset(resident.epoch or 0, resident.purged_at)
                resident.loaded = self._replica is None
            elif resident.loaded and resident.drop_aged():
                resident.build([*resident.strategies], replace_empty=True)
                if replica is not None:
                    await self._trim(replica, resident)
        if now - self._evicted_at >= _EVICT_SECONDS or self._residents.too_many:
            self._evicted_at = now
            self._residents.evict(self._process.outbox.names())
        if replica is not None:
            with suppress(MemoryStoreError):
                await self._note(replica, now)

    def forget_if_lapsed(self) -> bool:
        """Whether the lease has lapsed: the store was unavailable until purges stopped waiting for this process.

        Then it forgets all records.
        """
        if self._replica is None or not self._replica.purges.lapsed:
            return False
        if not self._forgot:
            self._forgot = True
            for resident in self._residents.all():
                resident.reset(resident.epoch, resident.purged_at)
            _log.warning("the store was away for a day: nothing is drafted from memories until it is back")
        return True

    def _fork(self, resident: Resident) -> None:
        """Without a store: copies the tenant's records to an arm's memory that is forked and empty."""
        base = self._residents.get(MemoryName(resident.name.tenant))
        empty = not resident.epoch and not len(resident.log)
        if resident.forked and empty and base is not None and base is not resident:
            resident.replace_log([LoggedRecord(logged.record) for logged in base.log], b"0-0")

    async def _trim(self, replica: Replica, resident: Resident) -> None:
        if resident.config.max_age and not resident.newer:
            with suppress(MemoryStoreError):
                oldest = resident.config.oldest(self._process.clock.now())
                await replica.memories.trim(resident.tag, resident.epoch or 0, oldest)

    async def _note(self, replica: Replica, now: float) -> None:
        self._forgot = False
        await replica.records.renew_used()
        if now - self._noted_at >= _NOTE_SECONDS:
            await replica.memories.catalogue.note_kind(self._process.naming.kind)
            self._noted_at = now
