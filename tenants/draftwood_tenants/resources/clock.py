"""Detects skew between the clock of this process and the store's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)

TOLERATED_SECONDS = 2.0
"""Clocks that are kept by NTP differ by milliseconds."""


class ClockWatch:
    """Compares the two clocks, and logs when they begin and cease to differ.

    Attributes:
        skew: seconds by which this process's clock is ahead of the store's at least; negative if it is behind; 0 while
            the difference is tolerated.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.skew = 0.0
        self._clock = clock

    @contextmanager
    def timing(self) -> Iterator[Callable[[float | None], None]]:
        """Around a call that asks the store for its time, which goes to what this returns."""
        began = self._clock()
        yield lambda stored: None if stored is None else self._compare(began, stored, self._clock())

    def _compare(self, began: float, stored: float, ended: float) -> None:
        """The store read its clock at some moment of the call: only what is outside of it is a difference."""
        skew = began - stored if stored < began else min(0.0, ended - stored)
        if abs(skew) <= TOLERATED_SECONDS:
            skew = 0.0
        if skew and not self.skew:
            affected = "expiry of credentials, times of experiments, ages of records"
            _log.warning(
                "the clock of this server differs from the store's; set it by NTP: %.1f s ahead; affected: %s",
                skew,
                affected,
            )
        if self.skew and not skew:
            _log.info("the clock of this server agrees with the store's again")
        self.skew = skew
