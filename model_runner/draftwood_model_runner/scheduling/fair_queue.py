"""The queue of waiting sequences: tenants by the service they received, sequences of a tenant by rank. No torch.

Between tenants this is the Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024):
the service of each tenant is counted in tokens over its weight, the least served is next, and a tenant that was idle
starts level with the least served of the others, so that idle time gives no claim. What it had been served beyond that
still counts, so that going idle for a moment forgives nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import ceil

from draftwood_model_runner.sequence import Sequence

_MOST_CLAIM = 4096.0
"""Tokens, over its weight, that a tenant can be behind the most served one: a tenant that long asked for little gets no
right to everything for as long. Not tuned."""

Rank = tuple[float, int]
"""A total order of all sequences, the first to be served least; it never changes while a sequence lives."""


class FairQueue:
    """Waiting sequences, and the service that the tenants of all live sequences received.

    Args:
        rank: the rank of a live sequence.
        weights: the share of a tenant relative to others; 1 for those not named. Read at each use.
    """

    def __init__(self, rank: Callable[[Sequence], Rank], weights: Mapping[str, float]) -> None:
        self._rank = rank
        self._weights = weights
        self._waiting: dict[str, list[Sequence]] = {}
        self._served: dict[str, float] = {}
        self._live: Counter[str] = Counter()
        self._count = 0
        self._most_served = 0.0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for waiting in self._waiting.values() for sequence in waiting)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def enter(self, sequence: Sequence) -> None:
        """Adds a new sequence."""
        tenant = sequence.request.tenant
        if tenant not in self._live:
            level = min(map(self.served, self._live), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, level), level)
        self._live[tenant] += 1
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Adds a live sequence that was taken out."""
        insort(self._waiting.setdefault(sequence.request.tenant, []), sequence, key=self._rank)
        self._count += 1

    def heads(self) -> list[Sequence]:
        """The first sequence of each tenant, that of the least served tenant first."""
        tenants = sorted(self._waiting, key=self.served)
        return [self._waiting[tenant][0] for tenant in tenants]

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence, which stays live until `leave`."""
        waiting = self._waiting[sequence.request.tenant]
        waiting.remove(sequence)
        if not waiting:
            del self._waiting[sequence.request.tenant]
        self._count -= 1

    def charge(self, tenant: str, tokens: int) -> None:
        """Counts service to a tenant."""
        self._served[tenant] = self.served(tenant) + tokens / self.weight(tenant)
        self._most_served = max(self._most_served, self._served[tenant])

    def leave(self, tenant: str) -> None:
        """A sequence of the tenant, which is not in the queue any more, has ended."""
        self._live[tenant] -= 1
        if self._live[tenant]:
            return
        del self._live[tenant]
        if not self._live:
            self._served.clear()
            self._most_served = 0.0
            return
        level = min(map(self.served, self._live))
        for idle in [one for one, served in self._served.items() if served <= level and one not in self._live]:
            del self._served[idle]

    def served(self, tenant: str) -> float:
        """Tokens over its weight that a tenant of live sequences was served, on a scale that all tenants share."""
        return max(self._served[tenant], self._most_served - _MOST_CLAIM)

    def share(self, tenant: str, slots: int) -> float:
        """How many of the slots belong to a tenant by its weight among those that have live sequences."""
        return slots * self.weight(tenant) / sum(map(self.weight, self._live))

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
        assert self._served.keys() >= self._live.keys()
        assert self._count == sum(map(len, self._waiting.values()))
        for tenant, waiting in self._waiting.items():
            assert waiting
            assert waiting == sorted(waiting, key=self._rank)
            assert all(sequence.request.tenant == tenant for sequence in waiting)
