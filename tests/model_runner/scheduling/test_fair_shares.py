"""What the scheduler knows of tenants without summing or sorting them anew is what the sums and sorts say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling.fair_queue import FairQueue, LeastServed, SlotLimit, SlotShares
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.scheduling.plain_shares import PlainShares
from tests.model_runner.sequences import make_sequence

TENANTS = st.sampled_from([f"t{number}" for number in range(7)])
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0, 3.0, 10.0])


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


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["add", "remove", "serve"]), st.integers(1, 5))))
def test_tenants_are_in_the_order_of_their_service_whoever_comes_and_goes(changes: list[tuple[str, str, int]]) -> None:
    served = dict.fromkeys("abcdef", 0.0)
    ordered, present = LeastServed(served), list[str]()
    for tenant, change, tokens in changes:
        if change == "serve":
            served[tenant] += tokens
        elif change == "add" and tenant not in present:
            ordered.add(tenant)
            present.append(tenant)
        elif change == "remove" and tenant in present:
            ordered.remove(tenant)
            present.remove(tenant)
        assert [*ordered.in_order()] == sorted(present, key=served.__getitem__)
        assert ordered.first() == min(present, key=served.__getitem__, default=None)


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    ordered = LeastServed({"first": 0.0, "other": 1.0})
    ordered.add("first")
    for _ in range(10_000):
        ordered.add("other")
        ordered.remove("other")
    assert len(ordered._heap) < 100
