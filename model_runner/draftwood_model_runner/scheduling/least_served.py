"""Tenants in the order of the service that they received. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from heapq import heapify, heappop, heappush, heapreplace

_MAX_STALE = 64
"""The heap is rebuilt once it has this many entries of removed tenants more than of present ones."""


class LeastServed:
    """A set of tenants, the least served first; of equals, the one that was added first.

    The service of a tenant only grows while it is in the set. So a heap entry with an old value comes to the top too
    early, never too late, and gets the present value there: charging a tenant costs nothing here.

    Args:
        served: the service of each tenant.
    """

    def __init__(self, served: Mapping[str, float]) -> None:
        self._served = served
        self._heap: list[tuple[float, int, str]] = []
        self._serials: dict[str, int] = {}
        self._serial = itertools.count()

    def add(self, tenant: str) -> None:
        """Adds a tenant that is not in the set."""
        assert tenant not in self._serials
        self._serials[tenant] = serial = next(self._serial)
        heappush(self._heap, (self._served[tenant], serial, tenant))

    def remove(self, tenant: str) -> None:
        """Removes a tenant that is in the set."""
        del self._serials[tenant]
        if len(self._heap) > 2 * len(self._serials) + _MAX_STALE:
            self._heap = [entry for entry in self._heap if self._is_present(entry)]
            heapify(self._heap)

    def first(self) -> str | None:
        """The least served tenant; None if there is none."""
        while self._heap:
            entry = self._heap[0]
            served, serial, tenant = entry
            if not self._is_present(entry):
                heappop(self._heap)
            elif (now := self._served[tenant]) > served:
                heapreplace(self._heap, (now, serial, tenant))
            else:
                return tenant
        return None

    def in_order(self) -> Generator[str]:
        """All tenants, the least served first. To be closed before the set changes or anybody is charged."""
        passed = []
        try:
            while (tenant := self.first()) is not None:
                yield tenant
                passed.append(heappop(self._heap))
        finally:
            for entry in passed:
                heappush(self._heap, entry)

    def _is_present(self, entry: tuple[float, int, str]) -> bool:
        _, serial, tenant = entry
        return self._serials.get(tenant) == serial
