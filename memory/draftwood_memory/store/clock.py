"""The time by the store's clock, by which records age: the clocks of processes may be wrong."""

from __future__ import annotations

import logging
import time
from typing import Any

_log = logging.getLogger(__name__)

_SKEW_SECONDS = 30.0
"""Beyond it a difference to the store's clock is logged: more than any round trip, less than any age."""


class StoreClock:
    """Unix time: the store's once it has answered, this process's until then. Safe to call from any thread."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()
        self._logged = False

    def now(self) -> float:
        return self.at(time.monotonic())

    def at(self, monotonic: float) -> float:
        """The Unix time at a time on the clock of `time.monotonic`."""
        return monotonic + self._ahead

    def synchronize(self, answer: list[Any]) -> float:
        """Sets the clock by the store's answer to TIME; returns it in seconds."""
        now = int(answer[0]) + int(answer[1]) / 1e6
        self._ahead = now - time.monotonic()
        skew = time.time() - now
        if abs(skew) > _SKEW_SECONDS and not self._logged:
            self._logged = True
            text = "this machine's clock is %.0f s %s the store's; ages of records are by the store's"
            _log.warning(text, abs(skew), "ahead of" if skew > 0 else "behind")
        return now
