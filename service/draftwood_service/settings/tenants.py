"""Tenants: what they may use, how they are drafted for, and what is learned of them."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from draftwood_memory.settings.memory_settings import MemorySettings, check_store
from draftwood_service.settings.group import OptionalSize, SettingsGroup, Size, shared
from draftwood_tenants.rate_limits import RateLimits


class QuotaSettings(SettingsGroup):
    """Tenants."""

    tenants_file: Path | None = None
    """YAML file of tenants and experiments, read when it changes; those that it names cannot be changed over the API"""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests of a tenant admitted in any 60 s, over all servers of the store"""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers of the requests of a tenant admitted in any 60 s, over all servers of the store"""
    concurrency: int | None = Field(default=None, ge=1)
    """Requests of a tenant that run or wait at once, over all servers of the store"""

    @property
    def rate_limits(self) -> RateLimits:
        """The default limits of tenants."""
        return RateLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)


class DraftingSettings(SettingsGroup):
    """Drafting."""

    strategy: str = shared("strategy")
    max_draft_nodes: int = shared("max_draft_nodes")
    audit_share: float = Field(default=0.01, ge=0, le=1)
    """Share of requests whose answers are decoded again without drafting in idle time, and compared"""

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, name: str) -> str:
        # Imported here: numba takes most of a second to import, which --help need not wait for.
        from draftwood_strategies import strategy_names

        if name not in strategy_names():
            raise ValueError(f"it must be one of {', '.join(strategy_names())}")
        return name


class StoreSettings(SettingsGroup):
    """Store and learned caches.

    The default of memory_tokens was measured: `draftwood bench memory` and `share`.
    """

    store: str = shared("store")
    store_folder: Path | None = shared("store_folder")
    store_bytes: Size = shared("store_bytes")
    store_timeout: float = shared("store_timeout")
    store_tls_ca: Path | None = shared("store_tls_ca")
    store_tls_cert: Path | None = shared("store_tls_cert")
    store_tls_key: Path | None = shared("store_tls_key")
    store_keys: str | None = shared("store_keys")
    store_key_file: Path | None = shared("store_key_file")
    max_tenants: int = shared("max_tenants")
    memory_tokens: int = shared("memory_tokens")
    memory_bytes: Size = shared("memory_bytes")
    memory_max_bytes: OptionalSize = shared("memory_max_bytes")
    memory_ttl: float = shared("memory_ttl")
    memory_max_age: float = shared("memory_max_age")
    memory_orphan_ttl: float = shared("memory_orphan_ttl")
    memory_idle: float = shared("memory_idle")
    memory_preload: int = shared("memory_preload")

    @property
    def of_memory(self) -> MemorySettings:
        """The same as plug-ins have them."""
        return MemorySettings(**self.model_dump(include={*StoreSettings.model_fields}))

    @property
    def memory_budget(self) -> int:
        """Bytes of all tenants' memories in RAM."""
        # Imported here, as it brings the rest of the memory.
        from draftwood_memory.config import default_max_bytes

        return default_max_bytes() if self.memory_max_bytes is None else self.memory_max_bytes

    @field_validator("store")
    @classmethod
    def _known_store(cls, given: str) -> str:
        if given not in ("memory", "embedded"):
            # Imported here: the Redis library takes a while to import, which --help need not wait for.
            from draftwood_memory.store.redis_client import RedisClient

            RedisClient(given)
        return given

    @model_validator(mode="after")
    def _check_store(self) -> Self:
        check_store(self)
        return self
