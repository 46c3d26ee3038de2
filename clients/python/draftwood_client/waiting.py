"""Waiting for a server that is starting or loading its model. Sends nothing and does not sleep."""

from __future__ import annotations

import math
import time

from draftwood_client._status import not_ready_error
from draftwood_client.errors import StatusError, UnavailableError

POLL_SECONDS = 0.2
"""Between two questions, each of which is retried as the client's policy says. Not tuned."""


class Waiting:
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
