"""What tenants taught: strategy instances by tenant, which a tenant shares with nobody, and the store behind them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from typing import Protocol

from model_runner.sequence import Sequence
from service.memory.names import MemoryName
from service.memory.tenants import TenantMemory
from strategies import Strategy

__all__ = ["Memory", "MemoryName", "TenantMemory"]


class Memory(Protocol):
    """Where a request's strategy comes from, and where what it wrote goes."""

    async def strategy(self, tenant: str, name: str) -> Strategy:
        """The tenant's own instance of the strategy `name`, with what the tenant taught it.

        Raises:
            UnknownStrategyError: no strategy has this name.
        """

    def lesson(self, sequences: SequenceOf[Sequence]) -> AbstractContextManager[object]:
        """Around a request's samples, which share a tenant and a strategy: what they wrote is learned at its end."""
