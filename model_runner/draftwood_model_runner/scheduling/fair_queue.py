"""The queue of waiting sequences: tenants by the service they received, sequences of a tenant by rank. No torch.

Between tenants this is the Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024):
the service of each tenant is counted in tokens over its weight, the least served is next, and a tenant that was idle
starts level with the least served of the others, so idle time earns no credit. What it had been served beyond that
still counts, so that going idle for a moment forgives nothing.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from heapq import heappop, heappush
from math import ceil

from draftwood_model_runner.scheduling.least_served import LeastServed
from draftwood_model_runner.sequence import Sequence

_MAX_LAG = 4096.0
"""A tenant is at most so many tokens, over its weight, behind the most served one: one that long asked for little does
not get all steps for as long."""

Rank = tuple[float, int]
"""A total order of all sequences: the least is served first. It never changes while a sequence lives."""


class FairQueue:
    """Waiting sequences, and the service that the tenants of all live sequences received.

    Nothing that a step asks for is summed or sorted over all tenants: sums change with the live tenants and their
    weights only, and waiting tenants are kept in the order of their service.

    Args:
        rank: the rank of a live sequence.
        weights: the share of a tenant relative to others; 1 for those not named. Read when a sequence enters.
    """

    def __init__(self, rank: Callable[[Sequence], Rank], weights: Mapping[str, float]) -> None:
        self._rank = rank
        self._weights = weights
        self._waiting: dict[str, list[Sequence]] = {}
        self._served: dict[str, float] = {}
        self._waiting_by_service = LeastServed(self._served)
        self._idle: list[tuple[float, str]] = []
        self._live: Counter[str] = Counter()
        self._live_weights: dict[str, float] = {}
        self._weight_sum: float | None = None
        self._with_share: tuple[int, list[str]] | None = None
        self._count = 0
        self._most_served = 0.0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for waiting in self._waiting.values() for sequence in waiting)

    def weight(self, tenant: str) -> float:
        """As of its last sequence that entered, if it has live ones."""
        weight = self._live_weights.get(tenant)
        return self._weights.get(tenant, 1.0) if weight is None else weight

    def enter(self, sequence: Sequence) -> None:
        """Adds a new sequence."""
        tenant = sequence.request.tenant
        if tenant not in self._live:
            level = self._level()
            self._served[tenant] = max(self._served.get(tenant, level), level)
        self._live[tenant] += 1
        if self._live_weights.get(tenant) != (weight := self._weights.get(tenant, 1.0)):
            self._live_weights[tenant] = weight
            self._weight_sum = self._with_share = None
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Adds a live sequence that was taken out."""
        tenant = sequence.request.tenant
        if (waiting := self._waiting.get(tenant)) is None:
            waiting = self._waiting[tenant] = []
            self._waiting_by_service.add(tenant)
        insort(waiting, sequence, key=self._rank)
        self._count += 1

    def head(self, tenant: str) -> Sequence:
        """The first waiting sequence of a tenant that has one."""
        return self._waiting[tenant][0]

    def by_service(self) -> Generator[str]:
        """The tenants of waiting sequences, the least served first. To be closed before anything changes."""
        return self._waiting_by_service.in_order()

    def with_share(self, slots: int) -> Iterator[str]:
        """The tenants of waiting sequences that at least one of the slots belongs to: at most as many as slots."""
        if self._with_share is None or self._with_share[0] != slots:
            self._with_share = slots, [tenant for tenant in self._live if self.share(tenant, slots) >= 1]
        return (tenant for tenant in self._with_share[1] if tenant in self._waiting)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence, which stays live until `leave`."""
        tenant = sequence.request.tenant
        waiting = self._waiting[tenant]
        waiting.remove(sequence)
        if not waiting:
            del self._waiting[tenant]
            self._waiting_by_service.remove(tenant)
        self._count -= 1

    def charge(self, tenant: str, tokens: int) -> None:
        """Counts service to a tenant of live sequences."""
        served = self.served(tenant) + tokens / self._live_weights[tenant]
        self._served[tenant] = served
        if served > self._most_served:
            self._most_served = served

    def leave(self, tenant: str) -> None:
        """A sequence of the tenant, which is not in the queue any more, has ended."""
        self._live[tenant] -= 1
        if self._live[tenant]:
            return
        del self._live[tenant], self._live_weights[tenant]
        self._weight_sum = self._with_share = None
        if not self._live:
            self._served.clear()
            self._idle.clear()
            self._most_served = 0.0
            return
        heappush(self._idle, (self._served[tenant], tenant))
        level = self._level()
        while self._idle and self._idle[0][0] <= level:
            served, idle = heappop(self._idle)
            if idle not in self._live and self._served.get(idle) == served:
                del self._served[idle]

    def served(self, tenant: str) -> float:
        """Tokens over its weight that a tenant of live sequences was served, on a scale that all tenants share."""
        served, least = self._served[tenant], self._most_served - _MAX_LAG
        return served if served > least else least

    def share(self, tenant: str, slots: int) -> float:
        """How many of the slots belong to a tenant by its weight among those that have live sequences."""
        return slots * self._live_weights[tenant] / self._weights_of_live()

    def split(self, tokens: int, wanted: Mapping[str, int]) -> dict[str, int]:
        """Divides tokens by weight; what a tenant does not need goes to the others (max-min fairness)."""
        shares: dict[str, int] = {}
        weights = sum(map(self.weight, wanted))
        for tenant in sorted(wanted, key=lambda tenant: wanted[tenant] / self.weight(tenant)):
            weight = self.weight(tenant)
            weights = max(weights, weight)
            # Rounded up, so that no token is left over.
            shares[tenant] = min(wanted[tenant], tokens, ceil(tokens * weight / weights))
            tokens -= shares[tenant]
            weights -= weight
        return shares

    def check(self, live: list[Sequence]) -> None:
        """Asserts that the counts are those of the live sequences, and each tenant's waiting ones are in order."""
        assert self._live == Counter(sequence.request.tenant for sequence in live)
        assert self._served.keys() >= self._live.keys() == self._live_weights.keys()
        assert {*self._waiting_by_service.in_order()} == {*self._waiting}
        assert self._weights_of_live() == math.fsum(self._live_weights.values())
        assert self._count == sum(map(len, self._waiting.values()))
        for tenant, waiting in self._waiting.items():
            assert waiting
            assert waiting == sorted(waiting, key=self._rank)
            assert all(sequence.request.tenant == tenant for sequence in waiting)

    def _level(self) -> float:
        """What the least served tenant of live sequences was served; 0 if there are none."""
        return min(map(self.served, self._live), default=0.0)

    def _weights_of_live(self) -> float:
        """The sum over all tenants of live sequences, rounded once, so that it does not drift."""
        if self._weight_sum is None:
            self._weight_sum = math.fsum(self._live_weights.values())
        return self._weight_sum
