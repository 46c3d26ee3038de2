"""Who runs when: fairness, priorities, deadlines, chunks; and a state machine over all of it with too little memory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Values
from hypothesis.stateful import RuleBasedStateMachine, consumes, initialize, invariant, rule

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling.fair_queue import FairQueue
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.scheduling.page_table import AttentionWindow
from draftwood_model_runner.scheduling.scheduler import PRIORITY_SECONDS, ScheduledSequence, Scheduler
from draftwood_model_runner.scheduling.slot_shares import QUANTUM
from draftwood_model_runner.sequence import Sequence, SequenceState
from draftwood_strategies.draft import Int32Array
from tests.model_runner.fake_kv import FakeMemory, held_alone
from tests.model_runner.sequences import make_sequence

PAGE = 16


class Bench:
    """A scheduler over fake KV memory, and an engine that writes one token a step."""

    def __init__(
        self,
        max_running: int = 4,
        pages: int = 10**4,
        prefix_cache: bool = False,
        window: AttentionWindow | None = None,
        **options: object,
    ) -> None:
        self.pages = pages
        self.pool = KVPool(pages, PAGE, prefix_cache, window=window)
        self.memory = FakeMemory(self.pool)
        chunks = {"prefill_chunk": 512, "shared_chunk": 128, **options}
        self.scheduler = Scheduler(self.pool, max_running, **chunks)  # type: ignore[arg-type]
        self.serial = 0

    def add(self, tenant: str = "a", prompt: int | Int32Array = 4, max_tokens: int = 8, **options: object) -> Sequence:
        self.serial += 1
        if isinstance(prompt, int):
            prompt = np.full(prompt, self.serial, np.int32)
        fields: Any = {"arrived_at": float(self.serial), **options}
        sequence = make_sequence(str(self.serial), prompt, StopParams(max_tokens), tenant=tenant, **fields)
        self.scheduler.add(sequence)
        return sequence

    def step(self, written: Callable[[Sequence], list[int]] = lambda _: [7]) -> list[ScheduledSequence]:
        plan = self.scheduler.schedule().scheduled
        self.scheduler.check()
        for work in plan:
            self.memory.run(work, written(work.sequence))
            if len(work.sequence.output) == work.sequence.request.stop.max_tokens:
                self.scheduler.finish(work.sequence)
        self.scheduler.check()
        return plan

    def finishing_order(self, limit: int = 10_000) -> list[str]:
        """Tenants, in the order in which their sequences end."""
        order = []
        for _ in range(limit):
            plan = self.step()
            order += [w.sequence.request.tenant for w in plan if w.sequence.state is SequenceState.FINISHED]
            if not self.scheduler.live:
                return order
        raise AssertionError("the scheduler makes no progress")


def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    bench = Bench(max_running=6)
    talkers = [bench.add("a", max_tokens=100) for _ in range(3)]
    bench.step()
    long = bench.add("b", prompt=4000)
    steps = 0
    while not long.output:
        before = [len(s.output) for s in talkers]
        tokens = {work.sequence: work.tokens for work in bench.step()}
        assert [len(s.output) for s in talkers] == [n + 1 for n in before]
        assert tokens[long] <= 128
        steps += 1
    assert steps == math.ceil(4000 / 128)


def test_a_prompt_alone_takes_larger_chunks() -> None:
    bench = Bench()
    long = bench.add(prompt=4000)
    steps = 0
    while not long.output:
        bench.step()
        steps += 1
    assert steps == math.ceil(4000 / 512)


def test_the_few_tokens_of_a_prompt_beyond_a_block_wait_for_the_next_step() -> None:
    bench = Bench(max_running=8, block=64)
    for _ in range(7):
        bench.add(max_tokens=100)
    bench.step()
    bench.add(prompt=100)  # 7 + 100 tokens are nearly two blocks
    assert [one.tokens for one in bench.step()] == [*[1] * 7, 100]
    bench.scheduler.finish(bench.scheduler.running[-1])
    bench.add(prompt=80)  # 23 more than a block
    assert [one.tokens for one in bench.step()] == [*[1] * 7, 57]
    assert [one.tokens for one in bench.step()] == [*[1] * 7, 23]


def test_a_prompt_runs_however_many_decode_beyond_a_block() -> None:
    bench = Bench(max_running=70, block=64)
    for _ in range(66):
        bench.add(max_tokens=100)
    bench.step()
    short = bench.add(prompt=4)
    bench.step()
    assert len(short.output) == 1


def test_a_short_prompt_is_not_held_up_by_another_tenants_long_one() -> None:
    bench = Bench()
    bench.add("a", prompt=4000)
    bench.step()
    short = bench.add("b", prompt=100)
    bench.step()
    assert len(short.output) == 1


def test_within_a_tenant_first_come_is_first_served() -> None:
    bench = Bench(max_running=2)
    sequences = [bench.add(prompt=n, max_tokens=5) for n in (300, 20, 700, 1, 50)]
    served: list[Sequence] = []
    while bench.scheduler.live:
        served += [work.sequence for work in bench.step() if work.sequence not in served]
    assert served == sequences


@pytest.mark.parametrize("weights", [{}, {"b": 3.0}])
def test_tenants_share_admissions_by_weight(weights: dict[str, float]) -> None:
    bench = Bench(max_running=2, weights=weights)
    for _ in range(40):
        bench.add("a")
    for _ in range(40):
        bench.add("b")
    first = Counter(bench.finishing_order()[:40])
    assert abs(first["b"] / first["a"] - weights.get("b", 1.0)) < 0.5


def test_a_tenant_that_writes_more_gets_fewer_turns() -> None:
    bench = Bench(max_running=1)
    for _ in range(20):
        bench.add("a", max_tokens=50)
    for _ in range(20):
        bench.add("b", max_tokens=5)
    first = Counter(bench.finishing_order()[:12])
    assert first["b"] >= 5 * first["a"]


def test_a_tenant_that_comes_late_is_served_next_and_has_no_claim_from_before() -> None:
    bench = Bench(max_running=1)
    for _ in range(20):
        bench.add("a")
    for _ in range(50):
        bench.step()
    for _ in range(3):
        bench.add("b")
    order = bench.finishing_order()
    assert order[1:7] in (["b", "a", "b", "a", "b", "a"], ["a", "b", "a", "b", "a", "b"])


def holding(bench: Bench) -> Counter[str]:
    """Slots by tenant."""
    return Counter(sequence.request.tenant for sequence in bench.scheduler.running)


def test_a_tenant_alone_uses_all_slots_and_another_gets_its_own_in_the_next_step() -> None:
    bench = Bench(max_running=4, prefix_cache=True)
    for _ in range(12):
        bench.add("a", max_tokens=400)
    for _ in range(50):
        bench.step()
    assert holding(bench) == {"a": 4}
    urgent = bench.add("b", max_tokens=10)
    for written in range(1, 11):
        bench.step()
        assert len(urgent.output) == written
    for _ in range(3):
        bench.add("b", max_tokens=400)
    bench.step()
    assert holding(bench) == {"a": 2, "b": 2}
    bench.add("c", max_tokens=400)
    bench.step()
    assert holding(bench)["c"] == 1


def test_slots_belong_to_tenants_by_weight() -> None:
    bench = Bench(max_running=8, weights={"b": 3.0})
    for tenant in "ab":
        for _ in range(20):
            bench.add(tenant, max_tokens=300)
    for _ in range(5):
        bench.step()
    assert holding(bench) == {"a": 2, "b": 6}


def test_more_tenants_than_slots_take_turns() -> None:
    bench = Bench(max_running=1, prefix_cache=True)
    first, second = bench.add("a", max_tokens=2000), bench.add("b", max_tokens=2000)
    for _ in range(1000):
        bench.step()
    assert abs(len(first.output) - len(second.output)) <= QUANTUM
    assert first.stats.preemptions >= 4
    assert first.stats.preemptions <= 1000 / QUANTUM * 2
    assert 900 < len(first.output) + len(second.output) <= 1000


def test_scheduling_takes_no_longer_with_many_tenants_that_wait() -> None:
    """The sums over all tenants that it once had took hundreds of times as long."""

    def seconds(waiting: int) -> float:
        bench, found = Bench(max_running=16), []
        for number in range(16 + waiting):
            bench.add(str(number), max_tokens=1000)
        for _ in range(30):
            began = time.perf_counter()
            plan = bench.scheduler.schedule().scheduled
            found.append(time.perf_counter() - began)
            for work in plan:
                bench.memory.run(work, [7])
        return sorted(found)[15]

    assert seconds(1000) < 20 * seconds(16)


def test_priority_orders_within_a_tenant_and_takes_nothing_from_another() -> None:
    bench = Bench(max_running=4)
    for _ in range(6):
        bench.add("b", max_tokens=300)
    bench.step()
    for _ in range(6):
        bench.add("a", max_tokens=300, priority=10)
    low, high = bench.add("b", max_tokens=300, priority=-1), bench.add("b", max_tokens=300, priority=1)
    for _ in range(20):
        bench.step()
        assert holding(bench) == {"a": 2, "b": 2}
    while not high.output:
        bench.step()
    assert low.output == []


def test_memory_that_a_tenant_holds_beyond_its_share_is_given_up_for_another() -> None:
    bench = Bench(max_running=4, pages=60)
    hogs = [bench.add("a", prompt=200, max_tokens=50) for _ in range(4)]
    bench.step()
    assert len(bench.scheduler.running) > 2
    guest = bench.add("b", prompt=200, max_tokens=50)
    bench.step()
    assert guest.committed > 0
    bench.finishing_order()
    assert [len(s.output) for s in (*hogs, guest)] == [50] * 5


def test_going_idle_forgives_nothing() -> None:
    bench = Bench(max_running=1)
    steady = bench.add("b", max_tokens=3000)
    bench.step()
    for _ in range(5):
        burst = bench.add("a", max_tokens=100)
        while burst.state is not SequenceState.FINISHED:
            bench.step()
    assert len(steady.output) >= 5 * 100 - QUANTUM


def test_a_head_that_does_not_fit_is_not_overtaken_for_ever() -> None:
    bench = Bench(pages=53)
    bench.add("a", prompt=500, max_tokens=20)
    large = bench.add("b", prompt=800, max_tokens=20)
    for _ in range(30):
        bench.add("a", prompt=20, max_tokens=20)
    order = bench.finishing_order()
    assert len(large.output) == 20
    assert order.index("b") <= 1


def test_priority_comes_first_but_not_for_ever() -> None:
    bench = Bench(max_running=1)
    old = bench.add(arrived_at=0.0)
    high = bench.add(priority=2, arrived_at=2 * PRIORITY_SECONDS - 1)
    late = bench.add(priority=2, arrived_at=2 * PRIORITY_SECONDS + 1)
    low = bench.add(priority=-1, arrived_at=PRIORITY_SECONDS - 1)
    served: list[Sequence] = []
    while bench.scheduler.live:
        served += [work.sequence for work in bench.step() if work.sequence not in served]
    assert served == [high, old, late, low]


def test_memory_is_taken_from_the_lowest_priority_and_then_from_the_newest() -> None:
    bench = Bench(pages=20)
    low = bench.add(priority=-1, max_tokens=300)
    old, newer, newest = bench.add(max_tokens=300), bench.add(max_tokens=10), bench.add(max_tokens=300)
    while not low.stats.preemptions:
        bench.step()
    assert newer.state is SequenceState.FINISHED
    assert bench.scheduler.running == [old, newest]
    while not newest.stats.preemptions:
        bench.step()
    assert bench.scheduler.running == [old]
    assert [*bench.scheduler._queue] == [newest, low]
    assert old.stats.preemptions == 0
    newcomer = bench.add()
    bench.scheduler.finish(old)
    bench.step()
    assert bench.scheduler.running == [newest, newcomer]  # both rank before the one of low priority
    bench.finishing_order()
    assert newcomer.stats.preemptions == 0
    assert [len(s.output) for s in (low, newer, newest)] == [300, 10, 300]


def test_a_sequence_that_the_others_give_up_too_little_for_makes_room_itself() -> None:
    bench = Bench(pages=20)
    first = bench.add(prompt=150, max_tokens=100)
    second = bench.add(prompt=4, max_tokens=300)
    while not second.stats.preemptions:
        bench.step()
    assert bench.scheduler.running == [first]
    bench.finishing_order()
    assert first.stats.preemptions == 0
    assert second.output == [7] * 300


def test_nobody_is_preempted_where_that_would_not_be_enough() -> None:
    """All but one page of the last by rank are shared with the first, so it gives up too little for the second."""
    bench = Bench(pages=40, prefix_cache=True)
    prompt = np.arange(300, dtype=np.int32)
    first = bench.add(prompt=prompt, max_tokens=5)
    bench.step()
    second, last = bench.add(prompt=4, max_tokens=310), bench.add(prompt=prompt, max_tokens=5)
    bench.scheduler.schedule()
    assert last.committed == 288
    pool = bench.pool
    assert held_alone(pool, [last]) < pool.pages(last).size - 288 // PAGE + 1
    assert held_alone(pool, [first, last]) == held_alone(pool, [first]) + held_alone(pool, [last]) + 288 // PAGE
    bench.finishing_order()
    assert [len(s.output) for s in (first, second, last)] == [5, 310, 5]


def test_deadlines_end_who_waits_and_who_runs() -> None:
    bench = Bench(max_running=1)
    running = bench.add(max_tokens=1000, deadline=110.0)
    waiting, patient = bench.add(deadline=105.0), bench.add()
    bench.step()
    overdue = bench.scheduler.overdue
    assert overdue(104.9) == []
    assert overdue(105.0) == [waiting]
    bench.scheduler.finish(waiting)
    assert overdue(109.9) == []
    assert overdue(110.0) == [running]
    bench.scheduler.finish(running)
    assert overdue(1e9) == []
    bench.step()
    assert len(patient.output) == 1


def test_a_deadline_that_can_not_be_met_ends_the_wait() -> None:
    bench = Bench(max_running=1)
    bench.scheduler.step_seconds = 0.5
    bench.add(max_tokens=1000)
    bench.step()
    hopeless, possible = bench.add(prompt=4000, deadline=103.0), bench.add(prompt=500, deadline=103.0)
    assert bench.scheduler.overdue(98.9) == []
    assert bench.scheduler.overdue(99.1) == [hopeless]  # eight chunks take four seconds
    bench.scheduler.finish(hopeless)
    assert bench.scheduler.overdue(102.4) == []
    assert bench.scheduler.overdue(102.6) == [possible]


@pytest.mark.parametrize(("field", "value"), [("priority", 11), ("priority", -11), ("deadline", math.nan)])
def test_what_a_sequence_may_not_ask_for(field: str, value: float) -> None:
    with pytest.raises(InvalidValueError) as caught:
        make_sequence("r", np.zeros(1, np.int32), StopParams(1), **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


@given(
    st.integers(1, 600), st.dictionaries(st.text(), st.tuples(st.integers(1, 900), st.floats(0.01, 100)), min_size=1)
)
def test_shares_are_fair_and_leave_nothing(tokens: int, tenants: dict[str, tuple[int, float]]) -> None:
    wanted = {tenant: want for tenant, (want, _) in tenants.items()}
    queue = FairQueue(lambda _: (0.0, 0), {tenant: weight for tenant, (_, weight) in tenants.items()})
    shares = queue.split(tokens, wanted)
    assert sum(shares.values()) == min(tokens, sum(wanted.values()))
    per_weight = {tenant: shares[tenant] / queue.weight(tenant) for tenant in tenants}
    for tenant in tenants:
        assert 0 <= shares[tenant] <= wanted[tenant]
        if shares[tenant] < wanted[tenant]:  # then nobody got more by weight, but for rounding
            slack = len(tenants) / min(map(queue.weight, tenants))
            assert all(per_weight[tenant] >= other - slack for other in per_weight.values())


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences of three tenants come, run, pause, are cancelled, run out of time; memory holds a fraction of them.

    Every row that is read holds what it should."""

    live = Values("live")

    @initialize(
        pages=st.integers(25, 75),
        max_running=st.integers(1, 6),
        chunk=st.integers(1, 60),
        prefix_cache=st.booleans(),
        window=st.none() | st.integers(1, 70),
        block=st.sampled_from([1, 8]),
    )
    def _make(
        self, pages: int, max_running: int, chunk: int, prefix_cache: bool, window: int | None, block: int
    ) -> None:
        chunks = {"prefill_chunk": chunk, "shared_chunk": chunk // 2 + 1, "block": block}
        model_table = None if window is None else AttentionWindow(window, chunk)
        self.bench = Bench(max_running, pages, prefix_cache, model_table, weights={"b": 2.0}, **chunks)

    @rule(
        target=live,
        tenant=st.sampled_from("abc"),
        prompt=st.lists(st.sampled_from([(1, 40), (2, 16), (3, 5)]), min_size=1, max_size=5),
        max_tokens=st.integers(1, 150),
        nodes=st.integers(0, 20),
        priority=st.integers(-2, 2),
        deadline=st.none() | st.integers(0, 300),
    )
    def add(self, tenant: str, prompt: list[tuple[int, int]], max_tokens: int, nodes: int, **options: Any) -> Sequence:
        # Each tenant's tokens are its own, so that a row of another's would be seen.
        ids = np.concatenate([np.full(count, token + 100 * ord(tenant), np.int32) for token, count in prompt])
        return self.bench.add(tenant, ids, max_tokens, max_draft_nodes=nodes, **options)

    @rule(steps=st.integers(1, 20), accepted=st.integers(1, 6))
    def step(self, steps: int, accepted: int) -> None:
        for _ in range(steps):
            waiting = any(one.state is not SequenceState.PAUSED for one in self.bench.scheduler.live)
            assert bool(self.write(accepted)) == waiting

    @rule(sequence=live)
    def pause(self, sequence: Sequence) -> None:
        self.bench.scheduler.pause(sequence)

    @rule(sequence=live)
    def resume(self, sequence: Sequence) -> None:
        self.bench.scheduler.resume(sequence)

    @rule(sequence=consumes(live), keep=st.booleans())
    def cancel(self, sequence: Sequence, keep: bool) -> None:
        self.bench.scheduler.finish(sequence, keep)

    @rule(now=st.integers(0, 300))
    def expire(self, now: int) -> None:
        late = self.bench.scheduler.overdue(float(now))
        for sequence in late:
            assert sequence.request.deadline is not None
            assert sequence.request.deadline <= now
            self.bench.scheduler.finish(sequence)
        left = [s.request.deadline for s in self.bench.scheduler.live if s.request.deadline is not None]
        assert min(left, default=math.inf) > now

    @invariant()
    def lawful(self) -> None:
        self.bench.scheduler.check()
        pool = self.bench.pool
        for sequence in self.bench.scheduler._queue:  # what is known of them is what a look-up from the beginning finds
            anew = Sequence(sequence.request, output=sequence.output)
            assert pool.cached(sequence) == pool.cached(anew)
            assert pool.shortfall_of_waiting(sequence) == pool.shortfall_of_waiting(anew)
            pool.leave(anew)

    def teardown(self) -> None:
        """Whatever happened, all that is left ends, without a step in which nobody runs."""
        scheduler = self.bench.scheduler
        left = scheduler.live
        for sequence in left:
            scheduler.resume(sequence)
        for _ in range(50_000):
            if not scheduler.live:
                break
            assert self.write(1)
        assert scheduler.live == []
        assert all(len(s.output) == s.request.stop.max_tokens for s in left)
        assert self.bench.pool.available == self.bench.pages

    def write(self, accepted: int) -> list[ScheduledSequence]:
        def written(sequence: Sequence) -> list[int]:
            left = sequence.request.stop.max_tokens - len(sequence.output)
            return [7] * min(accepted, left, sequence.request.max_draft_nodes + 1)

        return self.bench.step(written)


TestScheduling = SchedulerMachine.TestCase
TestScheduling.settings = settings(stateful_step_count=30)
