"""Rate limits of a tenant."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from draftwood_errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits of a tenant over all replicas; None for no limit.

    Attributes:
        requests_per_minute: admitted in any 60 s.
        tokens_per_minute: of prompts and answers of the requests admitted in any 60 s.
        concurrency: requests that run or wait at once.

    Raises:
        InvalidValueError: a limit is below 1.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and value < 1:
                raise InvalidValueError(one.name, value, "it must be at least 1")

    def with_defaults(self, default: RateLimits) -> RateLimits:
        """With those of `default` where there are none."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(default, **{name: value for name, value in values.items() if value is not None})

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return self != NO_LIMITS


NO_LIMITS = RateLimits()
