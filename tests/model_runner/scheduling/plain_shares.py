"""The fairness between tenants as it is defined: with sums and sorts over all live tenants, each time anew."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

from draftwood_model_runner.scheduling.fair_queue import QUANTUM
from draftwood_model_runner.sequence import Sequence

MOST_CLAIM = 4096.0


class PlainShares:
    """Tenants by weight and service; who holds slots, and who gives way to whom."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.weights: dict[str, float] = {}
        self.raw: dict[str, float] = {}
        self.most_served = 0.0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def live(self) -> list[str]:
        return list(dict.fromkeys(one.request.tenant for one in (*self.waiting, *self.running)))

    def served(self, tenant: str) -> float:
        return max(self.raw[tenant], self.most_served - MOST_CLAIM)

    def enter(self, sequence: Sequence, weight: float) -> None:
        tenant = sequence.request.tenant
        if tenant not in self.live:
            level = min(map(self.served, self.live), default=0.0)
            self.raw[tenant] = max(self.raw.get(tenant, level), level)
        self.weights[tenant] = weight
        self.waiting.append(sequence)

    def charge(self, tenant: str, tokens: int) -> None:
        self.raw[tenant] = self.served(tenant) + tokens / self.weights[tenant]
        self.most_served = max(self.most_served, self.raw[tenant])

    def end(self, sequence: Sequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if not self.live:
            self.raw.clear()
            self.most_served = 0.0

    def share(self, tenant: str) -> float:
        return self.slots * self.weights[tenant] / sum(self.weights[one] for one in self.live)

    def heads(self) -> list[Sequence]:
        first = {one.request.tenant: one for one in sorted(self.waiting, key=attrgetter("rank"), reverse=True)}
        by_service = sorted(first, key=lambda tenant: (self.served(tenant), self.raw[tenant]))
        return [first[tenant] for tenant in sorted(by_service, key=lambda tenant: not self.lacks(tenant))]

    def preemption_order(self) -> list[Sequence]:
        left, order = sorted(self.running, key=attrgetter("rank")), list[Sequence]()
        while left:
            held = Counter(one.request.tenant for one in left)
            tenant = max(held, key=lambda one: (held[one] / self.weights[one], self.served(one)))
            order.append([one for one in left if one.request.tenant == tenant][-1])
            left.remove(order[-1])
        return order

    def preemptible_for(self, sequence: Sequence) -> list[Sequence]:
        tenant, order = sequence.request.tenant, list[Sequence]()
        holding = Counter(one.request.tenant for one in self.running)
        for other in self.preemption_order():
            holder = other.request.tenant
            served_more = self.served(holder) - self.served(tenant) > QUANTUM
            if holder != tenant and holding[holder] > int(self.share(holder)) and (self.lacks(tenant) or served_more):
                holding[holder] -= 1
                order.append(other)
        return order

    def over_share(self) -> set[str]:
        holding = Counter(one.request.tenant for one in self.running)
        return {tenant for tenant, slots in holding.items() if slots >= self.share(tenant) + 1}

    def lacks(self, tenant: str) -> bool:
        return sum(one.request.tenant == tenant for one in self.running) < int(self.share(tenant))
