"""From settings to a limiter and the limits of tenants."""

from __future__ import annotations

from service.memory.opening import default_folder, key_ring, store_tls
from service.memory.store.embedded import url_of
from service.memory.store.redis_client import RedisClient
from service.quotas.limits import Limiter, RateLimits
from service.quotas.local import LocalLimiter
from service.quotas.shared import REFRESH_SECONDS, SharedLimiter
from service.settings import Settings


def opened_limiter(settings: Settings) -> Limiter:
    """A limiter that counts where the memories are stored, not started yet. Raises InvalidInputError."""
    if settings.store == "memory":
        return LocalLimiter()
    embedded = settings.store == "embedded"
    url = url_of(settings.store_folder or default_folder()) if embedded else settings.store
    keys = key_ring(settings)
    client = RedisClient(url, store_tls(settings), REFRESH_SECONDS)
    return SharedLimiter(client, None if keys is None else keys.naming_key)


def default_limits(settings: Settings) -> RateLimits:
    """Of every tenant."""
    return RateLimits(settings.requests_per_minute, settings.tokens_per_minute, settings.concurrency)
