"""What one tenant uses, in this process: a sliding window of one-second buckets, and leases. Pure; the caller has the
clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwood_service.quotas.limits import BUCKETS, LEASE_RETRY_SECONDS, QuotaExceededError
from draftwood_tenants.rate_limits import RateLimits


@dataclass(slots=True)
class Bucket:
    """Requests and tokens admitted within one second."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Window:
    """Of one tenant. Times are seconds of one clock that does not go back.

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
