"""Tenants' memories: what requests generated, learned by drafting strategies, shared by processes through a store.

A memory belongs to one tenant and one model. Nothing is shared between tenants. `Memory` is the entry; operators' calls
are in `operations`.
"""

from __future__ import annotations

from draftwood_memory.config import MemoryConfig, Terms
from draftwood_memory.memory import Learning, Memory, StrategyUse
from draftwood_memory.residents import StrategyKey
from draftwood_memory.store.naming import MemoryName
from draftwood_memory.store.redis_client import RedisClient, RedisTls

__all__ = [
    "Learning",
    "Memory",
    "MemoryConfig",
    "MemoryName",
    "RedisClient",
    "RedisTls",
    "StrategyKey",
    "StrategyUse",
    "Terms",
]
