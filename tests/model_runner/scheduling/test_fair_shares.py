"""What the scheduler knows of tenants without summing or sorting them anew is what the sums and sorts say; and how many
sequences run after a step that ran out of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling import fair_queue
from draftwood_model_runner.scheduling.fair_queue import QUANTUM, FairQueue, LeastServed, SlotLimit, SlotShares
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.sequences import make_sequence

TENANTS = st.sampled_from([f"t{number}" for number in range(7)])
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0, 3.0, 10.0])
MOST_CLAIM = 4096.0
PATIENCE = fair_queue._FIRST_PATIENCE


class PlainShares:
    """The fairness between tenants as it is defined: with sums and sorts over all live tenants, each time anew."""

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


class SharesMachine(RuleBasedStateMachine):
    """Sequences enter with weights that change, run, are served, wait again, and end, from either state."""

    @initialize(slots=st.integers(1, 12))
    def _make(self, slots: int) -> None:
        self.weights: dict[str, float] = {}
        self.entered = 0
        self.queue = FairQueue(self.weights)
        self.shares = SlotShares(self.queue, SlotLimit(slots))
        self.plain = PlainShares(slots)

    @rule(tenant=TENANTS, weight=WEIGHTS, rank=st.integers(0, 50))
    def enter(self, tenant: str, weight: float, rank: int) -> None:
        sequence = make_sequence("r", np.zeros(1, np.int32), StopParams(1), tenant=tenant)
        sequence.rank = (float(rank), self.entered)
        self.entered += 1
        self.weights[tenant] = weight
        self.queue.enter(sequence)
        self.plain.enter(sequence, weight)

    @precondition(lambda self: self.plain.waiting)
    @rule(draw=st.data())
    def run(self, draw: st.DataObject) -> None:
        sequence = draw.draw(st.sampled_from(self.plain.waiting))
        self.queue.remove(sequence)
        self.shares.started(sequence)
        self.plain.waiting.remove(sequence)
        self.plain.running.append(sequence)

    @precondition(lambda self: self.plain.running)
    @rule(draw=st.data(), tokens=st.sampled_from([1, 2, 100, 300, 3000]))
    def serve(self, draw: st.DataObject, tokens: int) -> None:
        tenant = draw.draw(st.sampled_from(self.plain.running)).request.tenant
        self.queue.charge(tenant, tokens)
        self.plain.charge(tenant, tokens)

    @precondition(lambda self: self.plain.running)
    @rule(draw=st.data())
    def preempt(self, draw: st.DataObject) -> None:
        sequence = draw.draw(st.sampled_from(self.plain.running))
        self.shares.stopped(sequence)
        self.queue.requeue(sequence)
        self.plain.running.remove(sequence)
        self.plain.waiting.append(sequence)

    @precondition(lambda self: self.plain.live)
    @rule(draw=st.data())
    def end(self, draw: st.DataObject) -> None:
        sequence = draw.draw(st.sampled_from([*self.plain.waiting, *self.plain.running]))
        if sequence in self.plain.running:
            self.shares.stopped(sequence)
        else:
            self.queue.remove(sequence)
        self.queue.leave(sequence.request.tenant)
        self.plain.end(sequence)

    @invariant()
    def same(self) -> None:
        plain, queue, shares = self.plain, self.queue, self.shares
        queue.check([*plain.waiting, *plain.running])
        shares.check(plain.running)
        for tenant in plain.live:
            assert queue.share(tenant, plain.slots) == pytest.approx(plain.share(tenant))
            assert queue.served(tenant) == plain.served(tenant)
        assert shares.over_share() == plain.over_share()
        assert [*shares.preemption_order()] == plain.preemption_order()
        order: Callable[[Sequence], object] = lambda one: (  # noqa: E731
            not plain.lacks(one.request.tenant),
            plain.served(one.request.tenant),
        )
        heads = [*shares.heads(free=True)]
        assert {*heads} == {*plain.heads()}
        assert [*map(order, heads)] == [*map(order, plain.heads())]
        for head in heads:
            assert [*shares.preemptible_for(head)] == plain.preemptible_for(head)
        gaining = {head for head in heads if plain.preemptible_for(head)}
        assert gaining <= {*shares.heads(free=False)}  # nobody who would get a slot is passed over


TestShares = SharesMachine.TestCase
TestShares.settings = settings(stateful_step_count=40)


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    ordered = LeastServed({"first": 0.0, "other": 1.0})
    ordered.add("first")
    for _ in range(10_000):
        ordered.add("other")
        ordered.remove("other")
    assert len(ordered._heap) < 100


def steps_until_growth(limit: SlotLimit, most: int = 10**7) -> int:
    """Steps in which all slots are in use and more are wanted."""
    return next(step for step in range(1, most) if limit.passed(limit.slots, 1))


def test_slots_are_halved_and_grow_to_what_was_configured() -> None:
    limit = SlotLimit(32)
    assert limit.out_of_memory(32)
    sizes = [limit.slots]
    while limit.slots < 32:
        assert steps_until_growth(limit) == 2 * PATIENCE
        sizes.append(limit.slots)
    assert sizes == [16, 20, 25, 31, 32]
    assert not any(limit.passed(32, 1) for _ in range(10 * PATIENCE))
    assert not SlotLimit(1).out_of_memory(1), "one sequence cannot be fewer"


@pytest.mark.parametrize(("running", "waiting"), [(15, 3), (16, 0)])
def test_steps_that_want_no_more_do_not_count(running: int, waiting: int) -> None:
    limit = SlotLimit(32)
    limit.out_of_memory(32)
    assert not any(limit.passed(running, waiting) for _ in range(10 * PATIENCE))
    assert limit.slots == 16


def test_a_failure_after_growth_takes_back_the_growth_and_the_next_try_is_later() -> None:
    limit = SlotLimit(32)
    assert limit.out_of_memory(32)
    waited = []
    for _ in range(12):
        waited.append(steps_until_growth(limit))
        assert limit.slots == 20
        assert limit.out_of_memory(20)
        assert limit.slots == 16
    assert waited[:3] == [2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE]
    assert waited[-1] == waited[-2] == fair_queue._MOST_PATIENCE
    assert limit.out_of_memory(16)  # not after a growth
    assert limit.slots == 8


def test_an_old_failure_is_forgotten() -> None:
    limit = SlotLimit(2)
    for _ in range(3):
        assert limit.out_of_memory(2)
        steps_until_growth(limit)
    assert not any(limit.passed(2, 1) for _ in range(fair_queue._MOST_PATIENCE))
    assert limit.out_of_memory(2)
    assert steps_until_growth(limit) == 2 * PATIENCE
