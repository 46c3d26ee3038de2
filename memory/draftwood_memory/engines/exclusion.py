"""A lock between the engine's thread and the background thread, and a timeout for strategies that do not return."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from draftwood_strategies.draft_engine.guard import CALL_LIMIT, FIRST_CALL_LIMIT
from draftwood_strategies.draft_engine.watchdog import Watchdog

_log = logging.getLogger("draftwood")

STEP_WAIT = 0.05
"""Seconds that a step of the engine waits for the other thread, which learns while the engine rests: as long as a long
step takes. A piece of that work takes a millisecond."""


_BUSY = "a strategy does not return to the other thread, where it cannot be interrupted"


class BusyError(TimeoutError):
    """The other thread keeps the lock."""


class Exclusion:
    """A lock, and a limit to what strategies take while it is held. Made on the engine's thread.

    Attributes:
        watchdog: interrupts strategies on that thread, if it is the main one of its process.
    """

    def __init__(self) -> None:
        self.watchdog = Watchdog()
        self._lock = threading.Lock()
        self._stuck = self._stepping = self._warned = False
        self._stepped_by = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock. Raises BusyError: the other thread keeps it, in a strategy that does not return."""
        if not self._lock.acquire(timeout=0.0 if self._stuck else CALL_LIMIT):
            self._stuck = True
            raise BusyError(_BUSY)
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def held_for_step(self) -> Iterator[None]:
        """As `held`, for the engine, which waits a moment at most: its step is then not drafted for."""
        self._stepping = True
        try:
            if not self._lock.acquire(timeout=0.0 if self._stuck else STEP_WAIT):
                self._stuck = True
                raise BusyError(_BUSY)
        finally:
            self._stepping = False
        self._stuck = False
        try:
            yield
        finally:
            self._lock.release()

    @property
    def wanted(self) -> bool:
        """The engine waits for the lock."""
        return self._stepping

    def run(self, task: Callable[[], None]) -> None:
        """Runs what may compile: a strategy that learns, or is made. Raises TimeoutError: it was interrupted."""
        self.watchdog.call(FIRST_CALL_LIMIT, task)

    def warn_if_uninterruptible(self) -> None:
        """Logs once if the present thread, which the engine steps on, cannot be interrupted."""
        thread = threading.get_ident()
        if thread == self._stepped_by or self._warned:
            return
        self._stepped_by, self._warned = thread, not self.watchdog.limits
        if self._warned:
            problem = "it does not step on the main thread of its process, or SIGUSR1 has another handler"
            _log.warning("a strategy that does not return stops this engine and cannot be interrupted: %s", problem)

    def close(self) -> None:
        """Removes the limit of calls. On the thread that made it."""
        self.watchdog.close()
