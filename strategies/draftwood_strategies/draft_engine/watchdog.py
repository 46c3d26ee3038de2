"""A time limit for calls into strategies: one that does not return would stop the engine, and with it every tenant.

An engine that steps on the main thread of its process can be interrupted by a signal, whatever Python code or system
call it is in. Compiled code that never returns to the interpreter cannot be; it is logged.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

_log = logging.getLogger(__name__)

_SIGNAL = signal.SIGUSR1
_PERIOD = 0.2
"""Seconds between two looks at the running call."""
_LOG_EVERY = 10.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class CallTimeoutError(TimeoutError):
    """A call did not return within its limit, and was interrupted."""


class _Interrupt(BaseException):
    """Raised inside the call. Not an `Exception`, so that handlers in the interrupted code let it pass."""


class Watchdog:
    """Interrupts calls on the main thread that take too long; on other threads calls have no limit.

    Made on another thread, or where something else handles the signal, it limits none.
    """

    def __init__(self) -> None:
        self._deadline: float | None = None
        self._owner = threading.get_ident()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if threading.current_thread() is threading.main_thread() and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            signal.signal(_SIGNAL, self._interrupt)
            self._thread = threading.Thread(target=self._watch, name="draft-watchdog", daemon=True)
            self._thread.start()

    @property
    def limits(self) -> bool:
        """Whether calls on the present thread have a limit."""
        return self._thread is not None and threading.get_ident() == self._owner

    def call(
        self, limit: float, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """What `function` returns.

        Args:
            limit: seconds that it may take.

        Raises:
            CallTimeoutError: it took longer.
            Exception: whatever it raises.
        """
        if not self.limits:
            return function(*args, **kwargs)
        self._deadline = time.monotonic() + limit
        try:
            return function(*args, **kwargs)
        except _Interrupt:
            self._deadline = None  # before any call: a second signal would be raised from here
            raise CallTimeoutError(f"no answer within {limit:g} s") from None
        finally:
            self._deadline = None

    def close(self) -> None:
        """Stops watching and restores the signal handler; idempotent. On the thread that made it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()  # a signal that it sent afterwards would end the process
            self._thread = None
            signal.signal(_SIGNAL, signal.SIG_DFL)

    def _watch(self) -> None:
        logged_at = float("-inf")
        while not self._stop.wait(_PERIOD):
            deadline, now = self._deadline, time.monotonic()
            if deadline is None or now < deadline:
                continue
            signal.pthread_kill(self._owner, _SIGNAL)
            if now - deadline > _LOG_EVERY and now - logged_at > _LOG_EVERY:
                logged_at = now
                _log.error("a strategy has not returned for %.0f s and cannot be interrupted", now - deadline)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise _Interrupt
