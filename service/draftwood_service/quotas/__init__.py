"""Rate limits of tenants: requests and tokens a minute and requests at once, over all replicas of a store.

Knows no gRPC. `opening.py` makes the limiter of the settings.
"""

from draftwood_service.quotas.limits import NO_LIMITS, Limiter, QuotaExceededError, RateLimits, Reservation

__all__ = ["NO_LIMITS", "Limiter", "QuotaExceededError", "RateLimits", "Reservation"]
