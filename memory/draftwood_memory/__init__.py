"""Tenants' memories: what requests generated, learned by drafting strategies, shared by processes through a store.

A memory belongs to one tenant and one model. Nothing is shared between tenants. `Memory` is the entry; operators' calls
are in `operations`. Names are imported when they are first used: `settings` then costs neither numba nor redis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood_memory.config import MemoryConfig, MemoryOverrides
    from draftwood_memory.memory import Learning, Memory, StrategyUse
    from draftwood_memory.resident import StrategyKey
    from draftwood_memory.store.naming import MemoryName
    from draftwood_memory.store.redis_client import RedisClient, RedisTls

__all__ = [
    "Learning",
    "Memory",
    "MemoryConfig",
    "MemoryName",
    "MemoryOverrides",
    "RedisClient",
    "RedisTls",
    "StrategyKey",
    "StrategyUse",
]

_MODULES = {
    "Learning": "memory",
    "Memory": "memory",
    "MemoryConfig": "config",
    "MemoryName": "store.naming",
    "RedisClient": "store.redis_client",
    "RedisTls": "store.redis_client",
    "StrategyKey": "resident",
    "StrategyUse": "memory",
    "MemoryOverrides": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
