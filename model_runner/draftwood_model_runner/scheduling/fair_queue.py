"""Tenants in the order of the service that they received."""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil
from operator import attrgetter

from draftwood_model_runner.sequence import Sequence

_rank = attrgetter("rank")
_MAX_STALE = 64
"""The heap is rebuilt once it has this many entries of removed tenants more than of present ones."""

_MAX_LAG = 4096.0
"""A tenant is at most so many tokens, over its weight, behind the most served one: one that long asked for little does
not get all steps for as long."""
_FIRST_PATIENCE, _MOST_PATIENCE = 256, 65_536
"""The number of slots grows after so many steps with all slots in use: some seconds at first, some ten minutes at most.
Each failure doubles it, so a load that never fits fails seldom. After the most steps without a failure it is the first
again."""
_GROWTH = 4
"""Slots grow by a quarter: from one half to all in three or four steps."""
QUANTUM = 128.0
"""A sequence gives up its slot to one of another tenant that has the slots that belong to it only if its own tenant was
served so many tokens more, over its weight. A switch may cost the recomputation of a prompt."""


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


class FairQueue:
    """Waiting sequences, and the service that the tenants of all live sequences received.

    Nothing that a step asks for is summed or sorted over all tenants: sums change with the live tenants and their
    weights only, and waiting tenants are kept in the order of their service.

    Args:
        weights: the share of a tenant relative to others; 1 for those not named. Read when a sequence enters.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
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
        insort(waiting, sequence, key=_rank)
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
        served, floor = self._served[tenant], self._most_served - _MAX_LAG
        return served if served > floor else floor

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
            assert waiting == sorted(waiting, key=_rank)
            assert all(sequence.request.tenant == tenant for sequence in waiting)

    def _level(self) -> float:
        """What the least served tenant of live sequences was served; 0 if there are none."""
        return min(map(self.served, self._live), default=0.0)

    def _weights_of_live(self) -> float:
        """The sum over all tenants of live sequences, rounded once, so that it does not drift."""
        if self._weight_sum is None:
            self._weight_sum = math.fsum(self._live_weights.values())
        return self._weight_sum


class SlotLimit:
    """The slots, at most as many as configured.

    A step that runs out of memory halves them; one that does so after they grew takes back that growth alone. They grow
    after many steps in which all were in use and more were wanted, since no others show that more would do.

    Args:
        configured: how many.

    Attributes:
        slots: how many there are now.
    """

    def __init__(self, configured: int) -> None:
        self.slots = configured
        self._most = configured
        self._good: int | None = None
        """What they were before they grew the last time, if no step has failed since."""
        self._full_steps = 0
        self._patience = _FIRST_PATIENCE

    def out_of_memory(self, running: int) -> bool:
        """A step of so many sequences did not fit; returns whether fewer can run."""
        if running < 2:
            return False
        before, self._good = self._good, None
        self.slots = before if before is not None and before < running else running // 2
        self._full_steps = 0
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        return True

    def passed(self, running: int, waiting: int) -> bool:
        """A step of so many sequences begins, and all before it fitted; returns whether there are more slots now."""
        if running < self.slots or not waiting:
            return False
        self._full_steps += 1
        if self.slots == self._most:
            if self._full_steps == _MOST_PATIENCE:
                self._good, self._patience = None, _FIRST_PATIENCE
            return False
        if self._full_steps < self._patience:
            return False
        self._full_steps = 0
        self._good = self.slots
        self.slots = min(self._most, self.slots + max(1, self.slots // _GROWTH))
        return True


class SlotShares:
    """The slots that belong to each tenant of live sequences, and the order in which running sequences lose theirs.

    Args:
        queue: knows weights and service of the tenants.
        limit: how many sequences run at once, at most.

    Attributes:
        running: the running sequences of each tenant that has any, by rank.
    """

    def __init__(self, queue: FairQueue, limit: SlotLimit) -> None:
        self._queue = queue
        self._limit = limit
        self.running: dict[str, list[Sequence]] = {}

    def started(self, sequence: Sequence) -> None:
        """A sequence runs from now on."""
        insort(self.running.setdefault(sequence.request.tenant, []), sequence, key=_rank)

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
        return self._preemption_order((holder for holder in giving if holder != tenant), self._guaranteed)

    def over_share(self) -> set[str]:
        """Tenants that hold at least one slot more than their share."""
        return {tenant for tenant, holding in self.running.items() if len(holding) >= self._share(tenant) + 1}

    def check(self, running: Iterable[Sequence]) -> None:
        """Asserts that these sequences run and no others."""
        holding = [sequence for sequences in self.running.values() for sequence in sequences]
        assert {*holding} == {*running}
        for tenant, sequences in self.running.items():
            assert sequences == sorted(sequences, key=_rank)
            assert all(sequence.request.tenant == tenant for sequence in sequences)

    def _preemption_order(self, tenants: Iterable[str], keeps: Callable[[str], int]) -> Iterator[Sequence]:
        """As `preemption_order`, for these tenants; `keeps` returns how many sequences each keeps."""
        weight, served = self._queue.weight, self._queue.served
        heap = []
        for tenant in tenants:
            holding = self.running[tenant]
            count = len(holding)
            heap.append((-count / weight(tenant), -served(tenant), holding[0].rank, count, tenant))
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
