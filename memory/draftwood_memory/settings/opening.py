"""Opens the memory that settings name: its store with its keys, and an embedded server where one is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from draftwood_memory.config import MemoryConfig, default_max_bytes
from draftwood_memory.memory import Memory
from draftwood_memory.settings.files import store_keys
from draftwood_memory.settings.memory_settings import MemorySettings
from draftwood_memory.store.embedded import EmbeddedServer, default_folder, socket_url
from draftwood_memory.store.redis_client import RedisClient, RedisTls


def store_client(settings: MemorySettings, timeout: float | None = None) -> RedisClient | None:
    """A client that connects when it is first used; None if there is no server (`store` is "memory").

    Args:
        timeout: seconds of a call; None for that of the settings.

    Raises:
        InvalidSettingError: the URL is wrong.
    """
    if settings.store == "memory":
        return None
    seconds = settings.store_timeout if timeout is None else timeout
    if settings.store == "embedded":
        return RedisClient(socket_url(settings.store_folder or default_folder()), None, seconds)
    tls = RedisTls(settings.store_tls_ca, settings.store_tls_cert, settings.store_tls_key)
    return RedisClient(settings.store, tls, seconds)


@contextmanager
def opened_memory(settings: MemorySettings, fingerprint: str) -> Iterator[Memory]:
    """The memory of the settings, not started yet. An embedded store runs as long as the context.

    Raises:
        InvalidSettingError: a setting cannot be used.
        StoreUnavailableError: the embedded store does not start.
    """
    config = MemoryConfig(
        tokens=settings.memory_tokens,
        bytes=settings.memory_bytes,
        max_resident=settings.max_tenants,
        max_bytes=default_max_bytes() if settings.memory_max_bytes is None else settings.memory_max_bytes,
        idle_seconds=settings.memory_idle,
        ttl=settings.memory_ttl,
        max_age=settings.memory_max_age,
        orphan_ttl=settings.memory_orphan_ttl,
    )
    with ExitStack() as stack:
        if settings.store == "embedded":
            server = EmbeddedServer(settings.store_folder or default_folder(), settings.store_bytes)
            stack.enter_context(server)
            server.wait()
        yield Memory(store_client(settings), fingerprint, config, store_keys(settings))
