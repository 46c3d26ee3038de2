"""When a request is sent again. Pure policy: sends nothing and sleeps nowhere."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from draftwood_client.errors import ArgumentValueError, StatusError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a request is sent again that the server did not take (UNAVAILABLE).

    The wait before attempt n + 1 is drawn from [0, min(max_backoff, initial_backoff * multiplier ** (n - 1))]
    ("full jitter"), on top of what the server asked for. A stream is only retried before its first event, and
    nothing is retried past the request's deadline.

    Attributes:
        max_attempts: the first one included; 0 and 1 both mean no retry.
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
        """Seconds at most, after `attempt` attempts (>= 1), not counting what the server asked for."""
        growth = self.multiplier ** min(attempt - 1, 100)
        return min(self.max_backoff, self.initial_backoff * growth)


NO_RETRY = RetryPolicy(max_attempts=1)

UNTIL_DEADLINE = RetryPolicy(max_attempts=2**31, max_backoff=0.5)
"""For waiting until a server is ready."""


class Attempts:
    """The attempts at one request, under one deadline.

    Args:
        policy: when to try again.
        timeout: seconds for all attempts together; None for no deadline.
        clock: monotonic, in seconds.

    Attributes:
        refusal: the latest error that another attempt may overcome; None where there was none.
    """

    def __init__(self, policy: RetryPolicy, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._failed = 0
        self.refusal: StatusError | None = None

    def remaining(self) -> float | None:
        """Seconds that are left, at least 0; None where there is no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def wait_after(self, error: StatusError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            StatusError: `error` itself, when there is no next attempt.
        """
        try:
            self._failed += 1
            if error.retryable:
                self.refusal = error
            wait = (error.retry_after or 0.0) + random.uniform(0.0, self._policy.longest_backoff(self._failed))
            remaining = self.remaining()
            last = not error.retryable or self._failed >= self._policy.max_attempts
            if last or (remaining is not None and wait >= remaining):
                raise error
            return wait
        finally:
            # This frame is in the error's traceback: with the error in it, the call and its connection would outlive
            # the client until the next garbage collection.
            del error
