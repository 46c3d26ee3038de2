"""From settings to a memory: which store, with which keys and limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model_runner.errors import InvalidValueError
from service.memory.codec.sealing import KeyRing, read_key_file, read_keys
from service.memory.store.base import Limits
from service.memory.store.embedded import EmbeddedServer
from service.memory.store.in_process import InProcessStore
from service.memory.store.redis_client import RedisClient, RedisTls
from service.memory.store.redis_store import RedisStore
from service.memory.tenants import MemoryConfig, TenantMemory
from service.settings import Settings

_FORGOTTEN_BEYOND = 4
"""The store in this process keeps, compressed, so many times the tenants that may be ready for use."""


@contextmanager
def opened_memory(settings: Settings, fingerprint: str) -> Iterator[TenantMemory]:
    """A memory as the settings say, not started yet; a server of our own runs as long as the context.

    Raises:
        InvalidValueError: a setting cannot be used.
        StoreUnavailableError: the server of our own does not start.
    """
    config = MemoryConfig(
        tokens=settings.memory_tokens,
        bytes=settings.memory_bytes,
        most_tenants=settings.max_tenants,
        idle_seconds=settings.memory_idle,
        ttl=settings.memory_ttl,
    )
    limits = Limits(config.log_bytes, config.ttl)
    keys = _keys(settings)
    if settings.store == "memory":
        most = _FORGOTTEN_BEYOND * settings.max_tenants
        yield TenantMemory(InProcessStore(limits, most), fingerprint, config, keys)
    elif settings.store == "embedded":
        with EmbeddedServer(settings.store_folder or default_folder(), settings.store_bytes) as server:
            server.wait()
            yield TenantMemory(RedisStore(RedisClient(server.url), fingerprint, limits), fingerprint, config, keys)
    else:
        tls = RedisTls(settings.store_tls_ca, settings.store_tls_cert, settings.store_tls_key)
        client = RedisClient(settings.store, tls, settings.store_timeout)
        yield TenantMemory(RedisStore(client, fingerprint, limits), fingerprint, config, keys)


def default_folder() -> Path:
    """Where the embedded store keeps its data if nothing else is said."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data, "draftwood", "store").expanduser()


def _keys(settings: Settings) -> KeyRing | None:
    if settings.store_keys is not None and settings.store_key_file is not None:
        raise InvalidValueError("store_key_file", str(settings.store_key_file), "store_keys is set as well; set one")
    if settings.store_key_file is not None:
        return read_key_file(settings.store_key_file, "store_key_file")
    return None if settings.store_keys is None else read_keys(settings.store_keys, "store_keys")
