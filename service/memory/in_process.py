"""Tenants' strategies in this process alone: gone with it, and bounded by the number of tenants."""

from __future__ import annotations

from collections import OrderedDict

from model_runner.errors import InvalidValueError
from strategies import Strategy, create


class InProcessMemory:
    """Keeps the strategies of the `max_tenants` tenants that asked last. Called from one thread.

    A tenant that is dropped starts anew when it comes back; its live sequences go on with what they hold.

    Raises:
        InvalidValueError: max_tenants is below 1.
    """

    def __init__(self, max_tenants: int) -> None:
        if max_tenants < 1:
            raise InvalidValueError("max_tenants", max_tenants, "it must be at least 1")
        self._max_tenants = max_tenants
        self._by_tenant: OrderedDict[str, dict[str, Strategy]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_tenant)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._by_tenant

    def strategy(self, tenant: str, name: str) -> Strategy:
        """The tenant's own instance of the strategy `name`, made at its first use.

        Raises:
            UnknownStrategyError: no strategy has this name.
        """
        known = self._by_tenant.get(tenant, {})
        if name not in known:
            known[name] = create(name)
        self._by_tenant[tenant] = known
        self._by_tenant.move_to_end(tenant)
        if len(self._by_tenant) > self._max_tenants:
            self._by_tenant.popitem(last=False)
        return known[name]
