"""Tenants' memories: what each tenant's requests generated, learned by its own drafting strategies, kept in a store.

A memory belongs to one tenant and one model. Nothing is shared between tenants.
"""

from __future__ import annotations

from service.memory.config import MemoryConfig
from service.memory.manager import MemoryManager
from service.memory.naming import MemoryName

__all__ = ["MemoryConfig", "MemoryManager", "MemoryName"]
