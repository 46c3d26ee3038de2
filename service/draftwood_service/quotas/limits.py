"""The error of a request beyond its tenant's limits."""

from __future__ import annotations

from draftwood_model_runner.errors import DraftwoodError

WINDOW_SECONDS = 60
BUCKETS = WINDOW_SECONDS + 1
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
