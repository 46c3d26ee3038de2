"""What tenants taught: strategy instances by tenant, which a tenant shares with nobody."""

from __future__ import annotations

from typing import Protocol

from service.memory.in_process import InProcessMemory
from strategies import Strategy

__all__ = ["InProcessMemory", "Memory"]


class Memory(Protocol):
    """Where a request's strategy comes from."""

    def strategy(self, tenant: str, name: str) -> Strategy:
        """The tenant's own instance of the strategy `name`, with what the tenant taught it.

        Raises:
            UnknownStrategyError: no strategy has this name.
        """
