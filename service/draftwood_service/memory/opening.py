"""From settings to a memory manager with its store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from draftwood_service.memory.config import MemoryConfig
from draftwood_service.memory.manager import MemoryManager
from draftwood_service.memory.store.base import Limits
from draftwood_service.memory.store.embedded import EmbeddedServer, default_folder
from draftwood_service.memory.store.in_process import InProcessStore
from draftwood_service.memory.store.redis_store import RedisStore
from draftwood_service.settings import Settings
from draftwood_service.store_client import store_client, store_keys

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
        max_age=settings.memory_max_age,
        orphan_ttl=settings.memory_orphan_ttl,
    )
    limits = Limits(config.log_bytes, config.stored_seconds)
    keys = store_keys(settings)
    client = store_client(settings)
    if client is None:
        store = InProcessStore(limits, _STORED_PER_RESIDENT * settings.max_tenants, stored_bytes)
        yield MemoryManager(store, fingerprint, config, keys)
    elif settings.store == "embedded":
        with EmbeddedServer(settings.store_folder or default_folder(), settings.store_bytes) as server:
            server.wait()
            yield MemoryManager(RedisStore(client, fingerprint, limits), fingerprint, config, keys)
    else:
        yield MemoryManager(RedisStore(client, fingerprint, limits), fingerprint, config, keys)
