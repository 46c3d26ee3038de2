"""Limits within this process: for a store in this process, and while a shared store does not answer."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from draftwood_service.quotas.limits import BUCKETS
from draftwood_service.quotas.window import Window
from draftwood_tenants.rate_limits import RateLimits


class Reservation:
    """What an admitted request may use until it is released, or further tokens of one.

    Attributes:
        window: that counts it, in the second `second`.
        on_release: called once with the refunded tokens and requests; `released` waits for what it returns.
    """

    def __init__(self, window: Window, lease: int, second: int, tokens: int, requests: int = 1) -> None:
        self.window = window
        self.lease = lease
        self.second = second
        self.on_release: Callable[[int, int], asyncio.Task[None] | None] = lambda tokens, requests: None
        self._tokens = tokens
        self._requests = requests
        self._open = True
        self._releasing: asyncio.Task[None] | None = None

    def release(self, used_tokens: int, counts: bool = True) -> None:
        """Refunds unused tokens, and releases the lease of the concurrency limit. Further calls do nothing.
        Returns at once, never raises, and works while the event loop ends.

        Args:
            counts: the request itself stays counted.
        """
        if self._open:
            self._open = False
            unused, requests = max(0, self._tokens - used_tokens), 0 if counts else self._requests
            self.window.refund(self.second, unused, requests)
            self.window.leases.discard(self.lease)
            self._releasing = self.on_release(unused, requests)

    async def released(self) -> None:
        """Waits shortly until other requests can use what `release` refunded."""
        if self._releasing is not None:
            await asyncio.shield(self._releasing)


class Limiter:
    """Counts what tenants use, in this process. For one event loop. Windows of idle tenants are dropped.

    Args:
        clock: seconds; does not go back.

    Attributes:
        windows: by tenant.
        outages: how often the store ceased to count; always 0 here, without a store.
        admitted_alone: requests that were admitted by this process's own counts meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.outages = self.admitted_alone = 0
        self.windows: dict[str, Window] = {}
        self.clock = clock
        self._leases = itertools.count()
        self._sweep_at = clock() + BUCKETS

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
            return Reservation(Window(), 0, 0, 0)
        self.window_of(tenant).check(limits, tokens, self.clock(), requests)
        return self.admit(tenant, limits, tokens, next(self._leases), requests)

    async def close(self) -> None:
        """Ends what `start` started."""

    def window_of(self, tenant: str) -> Window:
        self._sweep()
        return self.windows.setdefault(tenant, Window())

    def admit(self, tenant: str, limits: RateLimits, tokens: int, lease: int, requests: int) -> Reservation:
        """Counts a request without a check."""
        window = self.window_of(tenant)
        if limits.concurrency is not None:
            window.leases.add(lease)
        return Reservation(window, lease, window.add(tokens, self.clock(), requests), tokens, requests)

    def _sweep(self) -> None:
        now = self.clock()
        if now < self._sweep_at:
            return
        self._sweep_at = now + BUCKETS
        for tenant, window in tuple(self.windows.items()):
            window.forget(now)
            if window.idle:
                del self.windows[tenant]
