"""The store that the settings name: its address and keys. Both processes, the service and the engine, connect to it."""

from __future__ import annotations

from draftwood_service.memory.codec import KeyRing, read_key_file, read_keys
from draftwood_service.memory.store.embedded import default_folder, socket_url
from draftwood_service.memory.store.redis_client import RedisClient, RedisTls
from draftwood_service.settings import Settings


def store_client(settings: Settings, timeout: float | None = None) -> RedisClient | None:
    """A client that connects when it is first used; None if there is no server (`store` is "memory").

    Args:
        timeout: seconds of a call; None for that of the settings.

    Raises:
        InvalidInputError: the URL is wrong.
    """
    if settings.store == "memory":
        return None
    seconds = settings.store_timeout if timeout is None else timeout
    if settings.store == "embedded":
        return RedisClient(socket_url(settings.store_folder or default_folder()), None, seconds)
    tls = RedisTls(settings.store_tls_ca, settings.store_tls_cert, settings.store_tls_key)
    return RedisClient(settings.store, tls, seconds)


def store_keys(settings: Settings) -> KeyRing | None:
    """The keys that encrypt stored values. Raises InvalidInputError."""
    if settings.store_key_file is not None:
        return read_key_file(settings.store_key_file, "store_key_file")
    return None if settings.store_keys is None else read_keys(settings.store_keys, "store_keys")
