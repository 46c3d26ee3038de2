"""What tenants taught: strategy instances by tenant, which a tenant shares with nobody, and the store behind them."""

from __future__ import annotations

from service.memory.names import MemoryName
from service.memory.tenants import TenantMemory

__all__ = ["MemoryName", "TenantMemory"]
