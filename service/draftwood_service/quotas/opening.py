"""From settings to a limiter and the limits of tenants."""

from __future__ import annotations

from draftwood_service.quotas.local import Limiter
from draftwood_service.quotas.shared import SharedLimiter
from draftwood_service.quotas.store import REFRESH_SECONDS
from draftwood_service.settings.tenants import QuotaSettings, StoreSettings
from draftwood_service.store_client import store_client, store_keys
from draftwood_tenants.rate_limits import RateLimits


def opened_limiter(settings: StoreSettings) -> Limiter:
    """A limiter that counts where the memories are stored, not started yet. Raises InvalidInputError."""
    client, keys = store_client(settings, REFRESH_SECONDS), store_keys(settings)
    if client is None:
        return Limiter()
    return SharedLimiter(client, None if keys is None else keys.naming_key)


def default_limits(settings: QuotaSettings) -> RateLimits:
    """Of every tenant."""
    return RateLimits(settings.requests_per_minute, settings.tokens_per_minute, settings.concurrency)
