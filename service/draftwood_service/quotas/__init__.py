"""Rate limits of tenants: requests and tokens a minute and requests at once, over all replicas of a store.

Knows no gRPC.
"""

from draftwood_service.quotas.local import Limiter, QuotaExceededError, Reservation
from draftwood_tenants.config import NO_LIMITS, RateLimits

__all__ = ["NO_LIMITS", "Limiter", "QuotaExceededError", "RateLimits", "Reservation"]
