"""Who gives way to whom: slots belong to tenants by weight, and within a tenant rank decides. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

from draftwood_model_runner.scheduling.fair_queue import FairQueue, Rank
from draftwood_model_runner.sequence import Sequence

QUANTUM = 128.0
"""Tokens, over its weight, that a tenant must have been served beyond another before one of its sequences gives way to
the other's, where that has the slots that belong to it. Not tuned: a switch may cost the recomputation of a prompt."""


class SlotShares:
    """The slots that belong to each tenant of live sequences, and the order in which running sequences lose theirs.

    Args:
        queue: knows weights and service of the tenants.
        rank: the rank of a live sequence.
        slots: most sequences that run at once.
    """

    def __init__(self, queue: FairQueue, rank: Callable[[Sequence], Rank], slots: int) -> None:
        self._queue = queue
        self._rank = rank
        self.slots = slots

    def yielding(self, running: SequenceOf[Sequence]) -> list[Sequence]:
        """Running sequences in the order in which they give way: always the last by rank of the tenant that holds the
        most for its weight, and of several such tenants of the one that was served most."""
        of_tenant: dict[str, list[Sequence]] = {}
        for sequence in sorted(running, key=self._rank):
            of_tenant.setdefault(sequence.request.tenant, []).append(sequence)

        def holds(tenant: str) -> tuple[float, float]:
            return len(of_tenant[tenant]) / self._queue.weight(tenant), self._queue.served(tenant)

        order = []
        while of_tenant:
            tenant = max(of_tenant, key=holds)
            order.append(of_tenant[tenant].pop())
            if not of_tenant[tenant]:
                del of_tenant[tenant]
        return order

    def heads(self, running: SequenceOf[Sequence]) -> list[Sequence]:
        """The next waiting sequence of each tenant: first of those that lack slots, of equals the least served."""
        holding = _by_tenant(running)
        return sorted(self._queue.heads(), key=lambda head: not self._lacks(head.request.tenant, holding))

    def givers(self, sequence: Sequence, running: SequenceOf[Sequence]) -> Iterator[Sequence]:
        """The running sequences that give way to a waiting one, in their order.

        They are those of tenants with more slots than belong to them, if the tenant of the waiting one lacks slots or
        was served less by `QUANTUM`.
        """
        tenant, holding = sequence.request.tenant, _by_tenant(running)
        lacks = self._lacks(tenant, holding)
        for other in self.yielding(running):
            giver = other.request.tenant
            served_more = self._queue.served(giver) - self._queue.served(tenant) > QUANTUM
            if giver != tenant and holding[giver] > self._guaranteed(giver) and (lacks or served_more):
                holding[giver] -= 1
                yield other

    def above(self, running: SequenceOf[Sequence]) -> set[str]:
        """Tenants that hold at least one slot more than their share."""
        return {tenant for tenant, slots in _by_tenant(running).items() if slots >= self._share(tenant) + 1}

    def _lacks(self, tenant: str, holding: Counter[str]) -> bool:
        """Whether a tenant holds fewer slots than belong to it."""
        return holding[tenant] < self._guaranteed(tenant)

    def _guaranteed(self, tenant: str) -> int:
        return int(self._share(tenant))

    def _share(self, tenant: str) -> float:
        return self._queue.share(tenant, self.slots)


def _by_tenant(running: SequenceOf[Sequence]) -> Counter[str]:
    """Slots by tenant."""
    return Counter(sequence.request.tenant for sequence in running)
