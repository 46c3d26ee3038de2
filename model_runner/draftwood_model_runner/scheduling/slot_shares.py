"""Which sequences give up their slots. Slots belong to tenants by weight; in a tenant rank decides. No torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from heapq import heapify, heappop, heapreplace

from draftwood_model_runner.scheduling.fair_queue import FairQueue, Rank
from draftwood_model_runner.scheduling.slot_limit import SlotLimit
from draftwood_model_runner.sequence import Sequence

QUANTUM = 128.0
"""A sequence gives up its slot to one of another tenant that has the slots that belong to it only if its own tenant was
served so many tokens more, over its weight. A switch may cost the recomputation of a prompt."""


class SlotShares:
    """The slots that belong to each tenant of live sequences, and the order in which running sequences lose theirs.

    Args:
        queue: knows weights and service of the tenants.
        rank: the rank of a live sequence.
        limit: how many sequences run at once, at most.

    Attributes:
        running: the running sequences of each tenant that has any, by rank.
    """

    def __init__(self, queue: FairQueue, rank: Callable[[Sequence], Rank], limit: SlotLimit) -> None:
        self._queue = queue
        self._rank = rank
        self._limit = limit
        self.running: dict[str, list[Sequence]] = {}

    def started(self, sequence: Sequence) -> None:
        """A sequence runs from now on."""
        insort(self.running.setdefault(sequence.request.tenant, []), sequence, key=self._rank)

    def stopped(self, sequence: Sequence) -> None:
        """A sequence stopped running."""
        tenant = sequence.request.tenant
        self.running[tenant].remove(sequence)
        if not self.running[tenant]:
            del self.running[tenant]

    def preemption_order(self) -> Iterator[Sequence]:
        """Running sequences in the order in which they give way: always the last by rank of the tenant that holds the
        most for its weight, and of several such tenants of the one that was served most."""
        return self._preemption_order(self.running, lambda tenant: 0)

    def heads(self, free: bool) -> Generator[Sequence]:
        """The next waiting sequence of each tenant that may get a slot: first of those that lack slots, of equals the
        least served. To be closed before anything changes.

        Args:
            free: there is a free slot. Without one, a tenant that lacks none gets another's only if it was served less
                by `QUANTUM`.
        """
        queue = self._queue
        lacking = sorted(filter(self._lacks, queue.with_share(self._limit.slots)), key=queue.served)
        yield from map(queue.head, lacking)
        with closing(queue.by_service()) as by_service:
            for tenant in by_service:
                if not free and not any(self._giving(queue.served(tenant), lacks=False)):
                    return  # those that were served more get nothing either
                if tenant not in lacking:
                    yield queue.head(tenant)

    def preemptible_for(self, sequence: Sequence) -> Iterator[Sequence]:
        """The running sequences that give way to a waiting one, in their order.

        They are those of tenants with more slots than belong to them, if the tenant of the waiting one lacks slots or
        was served less by `QUANTUM`.
        """
        tenant = sequence.request.tenant
        giving = self._giving(self._queue.served(tenant), self._lacks(tenant))
        return self._preemption_order((one for one in giving if one != tenant), self._guaranteed)

    def over_share(self) -> set[str]:
        """Tenants that hold at least one slot more than their share."""
        return {tenant for tenant, holding in self.running.items() if len(holding) >= self._share(tenant) + 1}

    def check(self, running: Iterable[Sequence]) -> None:
        """Asserts that these sequences run and no others."""
        holding = [sequence for sequences in self.running.values() for sequence in sequences]
        assert {*holding} == {*running}
        for tenant, sequences in self.running.items():
            assert sequences == sorted(sequences, key=self._rank)
            assert all(sequence.request.tenant == tenant for sequence in sequences)

    def _preemption_order(self, tenants: Iterable[str], keeps: Callable[[str], int]) -> Iterator[Sequence]:
        """As `preemption_order`, for these tenants; `keeps` returns how many sequences each keeps."""
        weight, served = self._queue.weight, self._queue.served
        heap = []
        for tenant in tenants:
            holding = self.running[tenant]
            count = len(holding)
            heap.append((-count / weight(tenant), -served(tenant), self._rank(holding[0]), count, tenant))
        heapify(heap)
        while heap:
            _, less_served, rank, count, tenant = heap[0]
            yield self.running[tenant][count - 1]
            count -= 1
            if count > keeps(tenant):
                heapreplace(heap, (-count / weight(tenant), less_served, rank, count, tenant))
            else:
                heappop(heap)

    def _giving(self, served: float, lacks: bool) -> Iterator[str]:
        """Tenants that give a slot to a tenant that was served so much, or that lacks slots. They hold more slots than
        belong to them."""
        more, of_tenant = served + QUANTUM, self._queue.served
        return (
            tenant
            for tenant, holding in self.running.items()
            if (lacks or of_tenant(tenant) > more) and len(holding) > self._guaranteed(tenant)
        )

    def _lacks(self, tenant: str) -> bool:
        """Whether a tenant holds fewer slots than belong to it."""
        return len(self.running.get(tenant, ())) < self._guaranteed(tenant)

    def _guaranteed(self, tenant: str) -> int:
        return int(self._share(tenant))

    def _share(self, tenant: str) -> float:
        return self._queue.share(tenant, self._limit.slots)
