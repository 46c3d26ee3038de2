"""Limits of Tokenize and Detokenize, which cost a thousandth of what an answer does."""

from __future__ import annotations

import time
from collections.abc import Callable

from draftwood_service.quotas.limits import QuotaExceededError
from draftwood_service.quotas.local import Limiter
from draftwood_tenants.rate_limits import RateLimits

ALLOWANCE = 10
"""Calls for each request that a tenant may make in a minute, and their tokens for each token: more than preparing
prompts takes, and few enough that a tenant that does nothing else leaves the event loop to others."""

_NAMES = {"requests_per_minute": "text_calls_per_minute", "tokens_per_minute": "text_tokens_per_minute"}


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
