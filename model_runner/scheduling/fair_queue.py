"""The queue of waiting sequences: tenants by the service they received, sequences of a tenant by rank. No torch.

Between tenants this is the Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024):
the service of each tenant is counted in tokens over its weight, the least served is next, and a tenant that was idle
starts level with the least served of the others, so that idle time gives no claim.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import ceil

from model_runner.sequence import Sequence

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

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for waiting in self._waiting.values() for sequence in waiting)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def enter(self, sequence: Sequence) -> None:
        """Adds a new sequence."""
        tenant = sequence.request.tenant
        self._live[tenant] += 1
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=0.0)
        insort(self._waiting.setdefault(tenant, []), sequence, key=self._rank)
        self._count += 1

    def heads(self) -> list[Sequence]:
        """The first sequence of each tenant, that of the least served tenant first."""
        tenants = sorted(self._waiting, key=self._served.__getitem__)
        return [self._waiting[tenant][0] for tenant in tenants]

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence, which stays live."""
        waiting = self._waiting[sequence.request.tenant]
        waiting.remove(sequence)
        if not waiting:
            del self._waiting[sequence.request.tenant]
        self._count -= 1

    def charge(self, tenant: str, tokens: int) -> None:
        """Counts service to a tenant."""
        self._served[tenant] += tokens / self.weight(tenant)

    def leave(self, tenant: str) -> None:
        """A sequence of the tenant, which is not in the queue any more, has ended."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant], self._served[tenant]

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
        assert self._served.keys() == self._live.keys()
        assert self._count == sum(map(len, self._waiting.values()))
        for tenant, waiting in self._waiting.items():
            assert waiting
            assert waiting == sorted(waiting, key=self._rank)
            assert all(sequence.request.tenant == tenant for sequence in waiting)
