"""One request's part of its tenant's limits: reserved in part at its arrival, and in full once it was read."""

from __future__ import annotations

from draftwood_service.quotas.limits import QuotaExceededError
from draftwood_service.quotas.local import Limiter, Reservation
from draftwood_tenants.rate_limits import RateLimits


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
