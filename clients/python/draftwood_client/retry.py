"""When a request is sent again. Policy only: sends nothing and does not sleep."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from draftwood_client.errors import ArgumentValueError, StatusError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a request that failed with UNAVAILABLE is sent again.

    The wait before attempt n + 1 is drawn from [0, min(max_backoff, initial_backoff * multiplier ** (n - 1))]
    ("full jitter", AWS Architecture Blog, "Exponential Backoff And Jitter"), plus the delay that the server sent. A
    stream is only retried before its first event, and nothing past the request's deadline.

    Attributes:
        max_attempts: attempts, the first one included; 0 and 1 both mean no retry.
        initial_backoff, max_backoff: seconds.
        multiplier: at least 1.

    Raises:
        ArgumentValueError: a value is outside its range.
    """

    max_attempts: int = 4
    initial_backoff: float = 0.1
    max_backoff: float = 5.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        for name, lowest in (("max_attempts", 0), ("initial_backoff", 0), ("max_backoff", 0), ("multiplier", 1)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= lowest):
                raise ArgumentValueError(f"retry.{name}", f"{value!r} is not allowed; it must be at least {lowest}")

    def longest_backoff(self, attempt: int) -> float:
        """The longest wait in seconds after `attempt` attempts (>= 1), without the delay that the server sent."""
        growth = self.multiplier ** min(attempt - 1, 100)
        return min(self.max_backoff, self.initial_backoff * growth)


NO_RETRY = RetryPolicy(max_attempts=1)

UNTIL_DEADLINE = RetryPolicy(max_attempts=2**31, max_backoff=0.5)
"""For waiting until a server is ready."""


class Attempts:
    """The attempts at one request, under one deadline.

    Args:
        policy: number and timing of the attempts.
        timeout: seconds for all attempts together; None for no deadline.
        clock: monotonic, in seconds.

    Attributes:
        refusal: the latest retryable error; None if there was none.
    """

    def __init__(self, policy: RetryPolicy, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._failed = 0
        self.refusal: StatusError | None = None

    def remaining(self) -> float | None:
        """Seconds until the deadline, at least 0; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def wait_after(self, error: StatusError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            StatusError: `error` itself, if there is no next attempt.
        """
        try:
            self._failed += 1
            if error.retryable:
                self.refusal = error
            wait = (error.retry_after or 0.0) + random.uniform(0.0, self._policy.longest_backoff(self._failed))
            last = not error.retryable or self._failed >= self._policy.max_attempts
            if last or (self._deadline is not None and self._clock() + wait >= self._deadline):
                raise error
            return wait
        finally:
            # The error's traceback references this frame. A reference back to the error would keep the call and its
            # connection alive until the next garbage collection.
            del error
