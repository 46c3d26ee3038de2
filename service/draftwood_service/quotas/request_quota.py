"""One request's part of its tenant's limits: reserved in part at its arrival, and in full once it was read."""

from __future__ import annotations

import time
from collections.abc import Callable

from draftwood_service.quotas.local import Limiter, QuotaExceededError, Reservation
from draftwood_tenants.config import RateLimits

ALLOWANCE = 10
"""Calls for each request that a tenant may make in a minute, and their tokens for each token: more than preparing
prompts takes, and few enough that a tenant that does nothing else leaves the event loop to others."""
_NAMES = {"requests_per_minute": "text_calls_per_minute", "tokens_per_minute": "text_tokens_per_minute"}


class RequestQuota:
    """One request's part in the limits of its tenant. For one event loop.

    `enter` costs next to nothing, so that a tenant that is over a limit is refused before its prompt is tokenized or
    its grammar tried. A request that is not queued in the end, since it is invalid or the queue is full, is not
    counted.

    Args:
        limits: of the tenant.
    """

    def __init__(self, limiter: Limiter, tenant: str, limits: RateLimits) -> None:
        self._limiter = limiter
        self._tenant = tenant
        self._limits = limits
        self._parts: list[tuple[Reservation, int]] = []
        self._queued = False

    async def enter(self, tokens: int) -> None:
        """Counts the request, and takes a lease of the concurrency limit.

        Args:
            tokens: that it uses at least, as far as is known before it is read.

        Raises:
            QuotaExceededError: it does not fit.
        """
        self._parts.append((await self._limiter.reserve(self._tenant, self._limits, tokens), tokens))

    async def reserve_tokens(self, tokens: int) -> None:
        """Reserves what the request uses at most, prompt included, instead of what `enter` took.

        Raises:
            QuotaExceededError: it does not fit.
        """
        [(_, known)] = self._parts
        limit, more = self._limits.tokens_per_minute, tokens - known
        if limit is None or more <= 0:
            return
        try:
            rest = await self._limiter.reserve(self._tenant, RateLimits(tokens_per_minute=limit), more, requests=0)
        except QuotaExceededError as error:
            used, needed = max(0, error.used - known), error.needed + known
            raise QuotaExceededError(error.limit, error.value, used, needed, error.retry_seconds) from None
        self._parts.append((rest, more))

    def queued(self) -> None:
        """The request waits for the engine: it counts, however it ends."""
        self._queued = True

    def release(self, used_tokens: int) -> None:
        """Refunds what was not used, and everything if the request was not queued; see `Reservation.release`."""
        left = used_tokens if self._queued else 0
        for reservation, tokens in self._parts:
            reservation.release(min(left, tokens), self._queued)
            left -= min(left, tokens)

    async def released(self) -> None:
        """See `Reservation`."""
        for reservation, _ in self._parts:
            await reservation.released()


class TextCallQuota:
    """Counts these calls of each tenant apart from its requests, so that they take nothing of those.

    Within this process: what they cost is its time, and none of them waits for the store.

    Args:
        clock: seconds; does not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._counted = Limiter(clock)

    def admit(self, tenant: str, limits: RateLimits) -> None:
        """Counts a call whose tokens are not known yet.

        Args:
            limits: of the tenant's requests.

        Raises:
            QuotaExceededError: the calls of the last minute, or their tokens, are `ALLOWANCE` times its limit.
        """
        allowed = RateLimits(_times(limits.requests_per_minute), _times(limits.tokens_per_minute))
        if not allowed.any:
            return
        window, now = self._counted.window_of(tenant), self._counted.clock()
        try:
            window.check(allowed, 1, now)
        except QuotaExceededError as error:
            name = _NAMES[error.limit]
            raise QuotaExceededError(name, error.value, error.used, error.needed, error.retry_seconds) from None
        window.add(0, now)

    def count(self, tenant: str, limits: RateLimits, tokens: int) -> None:
        """Counts the tokens of an admitted call, however many there are: the calls after it are refused."""
        if limits.tokens_per_minute is not None:
            self._counted.window_of(tenant).add(tokens, self._counted.clock(), requests=0)


def _times(limit: int | None) -> int | None:
    return None if limit is None else ALLOWANCE * limit
