"""When a request is sent again, by gRPC itself (gRFC A6), and waiting for a server that starts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from draftwood_client.errors import ArgumentValueError, StatusError, UnavailableError
from draftwood_client.protocol.status import not_ready_error

MAX_ATTEMPTS = 5
"""gRPC makes no more attempts, whatever a policy says."""
_MIN_SECONDS = 0.01
"""gRPC 1.85 loses a request whose delay it rounds to 0 ms (docs/decisions)."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a request that failed with UNAVAILABLE is sent again.

    If the server sent a delay (`grpc-retry-pushback-ms`), the next attempt comes after it, or never if it is negative.
    Otherwise it comes after about min(max_backoff, initial_backoff * multiplier ** (n - 1)) seconds, n being the number
    of attempts so far; gRPC draws it within 20% of that. A stream is only retried before its first event, and nothing
    past the request's deadline.

    Attributes:
        max_attempts: attempts, the first one included, at most 5; 0 and 1 both mean no retry.
        initial_backoff, max_backoff: seconds, above 0.
        multiplier: at least 1.

    Raises:
        ArgumentValueError: a value is outside its range.
    """

    max_attempts: int = 4
    initial_backoff: float = 0.1
    max_backoff: float = 5.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_attempts <= MAX_ATTEMPTS:
            raise _outside("max_attempts", self.max_attempts, f"it must lie in [0, {MAX_ATTEMPTS}]")
        for name in ("initial_backoff", "max_backoff"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= _MIN_SECONDS):
                raise _outside(name, value, f"it must be at least {_MIN_SECONDS:g} seconds")
        if not (math.isfinite(self.multiplier) and self.multiplier >= 1):
            raise _outside("multiplier", self.multiplier, "it must be at least 1")

    def method_config(self) -> list[dict[str, Any]]:
        """The part `methodConfig` of a gRPC service config."""
        if self.max_attempts < 2:
            return []
        policy = {
            "maxAttempts": self.max_attempts,
            "initialBackoff": f"{self.initial_backoff:.9f}s",
            "maxBackoff": f"{self.max_backoff:.9f}s",
            "backoffMultiplier": self.multiplier,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        return [{"name": [{}], "retryPolicy": policy}]


NO_RETRY = RetryPolicy(max_attempts=1)


def _outside(name: str, value: float, allowed: str) -> ArgumentValueError:
    return ArgumentValueError(f"retry.{name}", f"{value!r} is not allowed; {allowed}")


POLL_SECONDS = 0.2
"""Between two questions, each of which is retried as the client's policy says."""


class ReadinessWait:
    """Until a server is ready, at most `limit` seconds from now; None for no limit."""

    def __init__(self, target: str, limit: float | None) -> None:
        self._target = target
        self._limit = limit
        self._deadline = None if limit is None else time.monotonic() + limit
        self._refusal: StatusError | None = None

    def remaining(self) -> float:
        """Seconds until the deadline, above 0; infinity without one."""
        return math.inf if self._deadline is None else max(1e-3, self._deadline - time.monotonic())

    def check(self, error: StatusError) -> None:
        """Raises `DeadlineError` with the server's last refusal if there is no time for another question."""
        if isinstance(error, UnavailableError):
            self._refusal = error
        if not isinstance(error, UnavailableError) or self.remaining() <= POLL_SECONDS:
            last = self._refusal or error
            raise not_ready_error(self._target, self._limit, last) from last
