"""Limits within this process: for a store in this process, and while a shared store does not answer."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from draftwood_model_runner.errors import DraftwoodError
from draftwood_tenants.config import RateLimits

BUCKETS = 61
"""Whole seconds that a window of 60 s touches. What was admitted counts until all of its second is 60 s ago, so that no
window of 60 s, wherever it begins, has more than the limit."""
LEASE_RETRY_SECONDS = 1.0
"""When to ask again for a lease of the concurrency limit: nobody knows when a request ends."""

_UNITS = {
    "requests_per_minute": "requests of the last minute",
    "tokens_per_minute": "tokens of the last minute, with those that running requests may still write",
    "concurrency": "requests that run or wait",
    "text_calls_per_minute": "calls of Tokenize and Detokenize in the last minute",
    "text_tokens_per_minute": "tokens of calls of Tokenize and Detokenize in the last minute",
}


class QuotaExceededError(DraftwoodError):
    """A limit of the tenant is reached.

    Attributes:
        limit: its name: a field of `RateLimits`, or "text_calls_per_minute" or "text_tokens_per_minute"
            (`TextCallQuota`).
        value: of the limit.
        used: of it, before this request.
        needed: by this request.
        retry_seconds: until the request would fit if nothing else is admitted; None if it never fits.
    """

    def __init__(self, limit: str, value: int, used: int, needed: int, retry_seconds: float | None) -> None:
        if needed > value:
            text = (
                f"the request may use {needed} tokens, and {value} are allowed; shorten the prompt or lower max_tokens"
            )
        else:
            text = f"{used} of {value} are used ({_UNITS[limit]}), and the request needs {needed}; try again later"
        super().__init__(f"{limit}: {text}")
        self.limit = limit
        self.value = value
        self.used = used
        self.needed = needed
        self.retry_seconds = None if needed > value else retry_seconds


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


@dataclass(slots=True)
class Bucket:
    """Requests and tokens admitted within one second."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Window:
    """What one tenant has used lately. Times are seconds of one clock that does not go back.

    Attributes:
        buckets: by whole second, of the last `BUCKETS` seconds.
        leases: of requests that have not ended, by id.
    """

    buckets: dict[int, Bucket] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)

    def check(self, limits: RateLimits, tokens: int, now: float, requests: int = 1) -> None:
        """Raises QuotaExceededError if so many requests, of so many tokens, do not fit."""
        self.forget(now)
        if limits.concurrency is not None and len(self.leases) >= limits.concurrency:
            used = len(self.leases)
            raise QuotaExceededError("concurrency", limits.concurrency, used, 1, LEASE_RETRY_SECONDS)
        for limit, kind, needed in (
            ("requests_per_minute", "requests", requests),
            ("tokens_per_minute", "tokens", tokens),
        ):
            value: int | None = getattr(limits, limit)
            if value is None:
                continue
            counts = {second: getattr(bucket, kind) for second, bucket in self.buckets.items()}
            used = sum(counts.values())
            if used + needed > value:
                raise QuotaExceededError(limit, value, used, needed, _until(counts, used + needed - value, now))

    def add(self, tokens: int, now: float, requests: int = 1) -> int:
        """Counts requests; their second, for `refund`."""
        bucket = self.buckets.setdefault(int(now), Bucket())
        bucket.requests += requests
        bucket.tokens += tokens
        return int(now)

    def refund(self, second: int, tokens: int, requests: int = 0) -> None:
        """Takes back tokens of a request, and requests; does nothing if its second has left the window."""
        if bucket := self.buckets.get(second):
            bucket.tokens = max(0, bucket.tokens - tokens)
            bucket.requests = max(0, bucket.requests - requests)

    def forget(self, now: float) -> None:
        """Drops buckets that no window of 60 s reaches any more."""
        for second in [second for second in self.buckets if second <= int(now) - BUCKETS]:
            del self.buckets[second]

    @property
    def idle(self) -> bool:
        return not (self.buckets or self.leases)


def _until(counts: dict[int, int], excess: int, now: float) -> float:
    """Seconds until the oldest buckets with `excess` together have left the window."""
    for second in sorted(counts):
        excess -= counts[second]
        if excess <= 0:
            return second + BUCKETS - now
    return float(BUCKETS)  # the request alone is above the limit
