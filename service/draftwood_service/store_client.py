"""The store that the settings name: its address and keys. Both processes, the service and the engine, connect to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from draftwood_memory.memory import Memory
from draftwood_memory.settings import files, opening
from draftwood_memory.settings.memory_settings import MemorySettings
from draftwood_memory.store.encryption import KeyRing
from draftwood_memory.store.redis_client import RedisClient
from draftwood_service.settings import named_settings
from draftwood_service.settings.tenants import StoreSettings


def _shared(settings: StoreSettings) -> MemorySettings:
    """The settings of store and memories, as plug-ins have them."""
    return MemorySettings(**settings.model_dump(include={*StoreSettings.model_fields}))


def store_client(settings: StoreSettings, timeout: float | None = None) -> RedisClient | None:
    """As `opening.store_client`. Raises InvalidInputError: the URL is wrong."""
    with named_settings():
        return opening.store_client(_shared(settings), timeout)


def store_keys(settings: StoreSettings) -> KeyRing | None:
    """The keys that encrypt stored values. Raises InvalidInputError."""
    with named_settings():
        return files.store_keys(_shared(settings))


@contextmanager
def opened_memory(settings: StoreSettings, fingerprint: str) -> Iterator[Memory]:
    """As `opening.opened_memory`. Raises InvalidInputError and StoreUnavailableError."""
    with ExitStack() as stack:
        with named_settings():
            memory = stack.enter_context(opening.opened_memory(_shared(settings), fingerprint))
        yield memory
