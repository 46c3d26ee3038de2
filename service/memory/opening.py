"""From settings to a memory manager with its store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.memory.codec import KeyRing, read_key_file, read_keys
from service.memory.config import MemoryConfig
from service.memory.manager import MemoryManager
from service.memory.store.base import Limits
from service.memory.store.embedded import EmbeddedServer
from service.memory.store.in_process import InProcessStore
from service.memory.store.redis_client import RedisClient, RedisTls
from service.memory.store.redis_store import RedisStore
from service.settings import Settings

_STORED_PER_RESIDENT = 4
"""The store in this process keeps this many times the memories that may be resident; the others are compressed
snapshots, a fraction of an index's size. Not tuned."""


_IN_PROCESS_SHARE = 4
"""The store in this process has a quarter of `memory_max_bytes`: its compressed snapshots take a tenth of an index. Not
tuned."""


@contextmanager
def opened_memory(settings: Settings, fingerprint: str) -> Iterator[MemoryManager]:
    """The memory manager of the settings, not started yet. An embedded store runs as long as the context.

    Raises:
        InvalidInputError: a setting cannot be used.
        StoreUnavailableError: the embedded store does not start.
    """
    stored_bytes = settings.memory_budget // _IN_PROCESS_SHARE if settings.store == "memory" else 0
    config = MemoryConfig(
        tokens=settings.memory_tokens,
        bytes=settings.memory_bytes,
        max_resident=settings.max_tenants,
        max_bytes=settings.memory_budget - stored_bytes,
        idle_seconds=settings.memory_idle,
        ttl=settings.memory_ttl,
        orphan_ttl=settings.memory_orphan_ttl,
    )
    limits = Limits(config.log_bytes, config.ttl)
    keys = key_ring(settings)
    if settings.store == "memory":
        store = InProcessStore(limits, _STORED_PER_RESIDENT * settings.max_tenants, stored_bytes)
        yield MemoryManager(store, fingerprint, config, keys)
    elif settings.store == "embedded":
        with EmbeddedServer(settings.store_folder or default_folder(), settings.store_bytes) as server:
            server.wait()
            yield MemoryManager(RedisStore(RedisClient(server.url), fingerprint, limits), fingerprint, config, keys)
    else:
        client = RedisClient(settings.store, store_tls(settings), settings.store_timeout)
        yield MemoryManager(RedisStore(client, fingerprint, limits), fingerprint, config, keys)


def default_folder() -> Path:
    """The embedded store's folder unless one is set."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data, "draftwood", "store").expanduser()


def store_tls(settings: Settings) -> RedisTls:
    return RedisTls(settings.store_tls_ca, settings.store_tls_cert, settings.store_tls_key)


def key_ring(settings: Settings) -> KeyRing | None:
    """The keys that encrypt stored values; None if they are stored as they are. Raises InvalidInputError."""
    if settings.store_key_file is not None:
        return read_key_file(settings.store_key_file, "store_key_file")
    return None if settings.store_keys is None else read_keys(settings.store_keys, "store_keys")
