"""Limits within this process: for a store in this process, and while a shared store does not answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from draftwood_service.quotas.limits import BUCKETS, Reservation
from draftwood_service.quotas.window import Window
from draftwood_tenants.rate_limits import RateLimits


class Windows:
    """The windows of all tenants of this process. Those of idle tenants are dropped.

    Args:
        clock: seconds; does not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.by_tenant: dict[str, Window] = {}
        self._ids = itertools.count()
        self._sweep_at = clock() + BUCKETS

    def of(self, tenant: str) -> Window:
        self._sweep()
        return self.by_tenant.setdefault(tenant, Window())

    def next_lease(self) -> int:
        """An id for a request's lease."""
        return next(self._ids)

    def admit(self, tenant: str, limits: RateLimits, tokens: int, lease: int, requests: int) -> Entry:
        """Counts a request without a check."""
        window = self.of(tenant)
        entry = Entry(window, lease, window.add(tokens, self.clock(), requests), tokens, requests)
        if limits.concurrency is not None:
            window.leases.add(entry.lease)
        return entry

    def _sweep(self) -> None:
        now = self.clock()
        if now < self._sweep_at:
            return
        self._sweep_at = now + BUCKETS
        for tenant, window in tuple(self.by_tenant.items()):
            window.forget(now)
            if window.idle:
                del self.by_tenant[tenant]


class Entry:
    """A request in a window, or further tokens of one; the reservation of a `Limiter`."""

    def __init__(self, window: Window, lease: int, second: int, tokens: int, requests: int = 1) -> None:
        self.window = window
        self.requests = requests
        self.lease = lease
        self.second = second
        self.tokens = tokens
        self.open = True

    def settle(self, used_tokens: int, counts: bool = True) -> None:
        """See `Reservation`."""
        if self.open:
            self.open = False
            self.window.give_back(self.second, max(0, self.tokens - used_tokens), 0 if counts else self.requests)
            self.window.leases.discard(self.lease)

    async def settled(self) -> None:
        """See `Reservation`: it is at once."""


class Limiter:
    """Counts what tenants use, in this process. For one event loop.

    Attributes:
        outages: how often its store ceased to count for all tenants; here there is none.
        admitted_alone: requests that were admitted by this server's share of their limits meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.outages = self.admitted_alone = 0
        self.windows = Windows(clock)

    def start(self) -> None:
        """Starts what runs beside requests."""

    async def reserve(self, tenant: str, limits: RateLimits, tokens: int, requests: int = 1) -> Reservation:
        """Admits a request that uses at most `tokens` tokens, prompt included.

        Args:
            requests: 0 for further tokens of one that is counted already.

        Raises:
            QuotaExceededError: it does not fit.
        """
        if not limits.any:
            return Entry(Window(), 0, 0, 0)
        self.windows.of(tenant).check(limits, tokens, self.windows.clock(), requests)
        return self.windows.admit(tenant, limits, tokens, self.windows.next_lease(), requests)

    async def close(self) -> None:
        """Ends what `start` started."""
