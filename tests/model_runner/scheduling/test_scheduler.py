"""Who runs when: fairness, priorities, deadlines, chunks; and a state machine over all of it with too little memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Values
from hypothesis.stateful import RuleBasedStateMachine, consumes, initialize, invariant, rule

from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling.fair_queue import QUANTUM, FairQueue
from draftwood_model_runner.scheduling.kv_pool import AttentionWindow, KVPool
from draftwood_model_runner.scheduling.scheduler import PRIORITY_SECONDS, ScheduledSequence, Scheduler
from draftwood_model_runner.sequence import Sequence, SequenceState
from draftwood_strategies.arrays import Int32Array
from tests.model_runner.counting import calls_of
from tests.model_runner.fake_kv import FakeMemory
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

    def crowd(self, count: int, tenant: str = "a", **options: Any) -> list[Sequence]:
        return [self.add(tenant, **options) for _ in range(count)]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def steps_until(self, done: Callable[[], object]) -> None:
        for _ in range(10_000):
            if done():
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def running(self) -> Counter[str]:
        """Slots by tenant."""
        return Counter(sequence.request.tenant for sequence in self.scheduler.running)

    def step(self, written: Callable[[Sequence], list[int]] = lambda _: [7]) -> list[ScheduledSequence]:
        plan = self.scheduler.schedule().scheduled
        self.scheduler.check()
        for work in plan:
            self.memory.run(work, written(work.sequence))
            if len(work.sequence.output) == work.sequence.request.stop.max_tokens:
                self.scheduler.finish(work.sequence)
        self.scheduler.check()
        return plan

    def finishing_order(self) -> list[Sequence]:
        """Steps until all sequences end; returns them in the order in which they do."""
        order: list[Sequence] = []
        while self.scheduler.live:
            works = [work.sequence for work in self.step()]
            assert works, "somebody runs"
            order += [sequence for sequence in works if sequence.state is SequenceState.FINISHED]
        return order

    def finishing_tenants(self) -> str:
        """One letter for each sequence, in the order in which they end."""
        return "".join(sequence.request.tenant for sequence in self.finishing_order())


@pytest.mark.parametrize(("talkers", "chunk"), [(0, 512), (3, 128)])
def test_a_long_prompt_takes_smaller_chunks_beside_those_who_decode_in_every_step(talkers: int, chunk: int) -> None:
    bench = Bench(max_running=6)
    others = bench.crowd(talkers, max_tokens=100)
    bench.steps(1)
    long = bench.add("b", prompt=4000)
    for step in range(math.ceil(4000 / chunk)):
        assert not long.output
        tokens = {work.sequence: work.tokens for work in bench.step()}
        assert [len(s.output) for s in others] == [step + 2] * talkers
        assert tokens[long] <= chunk
    assert long.output


def test_the_few_tokens_of_a_prompt_beyond_a_block_wait_for_the_next_step() -> None:
    bench = Bench(max_running=8, block=64)
    bench.crowd(7, max_tokens=100)
    bench.steps(1)
    bench.add(prompt=100)  # 7 + 100 tokens are nearly two blocks
    assert [work.tokens for work in bench.step()] == [*[1] * 7, 100]
    bench.scheduler.finish(bench.scheduler.running[-1])
    bench.add(prompt=80)  # 23 more than a block
    assert [work.tokens for work in bench.step()] == [*[1] * 7, 57]
    assert [work.tokens for work in bench.step()] == [*[1] * 7, 23]


def test_a_prompt_runs_however_many_decode_beyond_a_block() -> None:
    bench = Bench(max_running=70, block=64)
    bench.crowd(66, max_tokens=100)
    bench.steps(1)
    short = bench.add(prompt=4)
    bench.steps(1)
    assert len(short.output) == 1


@pytest.mark.parametrize(("weights", "slots"), [({}, {"a": 4, "b": 4}), ({"b": 3.0}, {"a": 2, "b": 6})])
def test_tenants_share_slots_and_admissions_by_weight(weights: dict[str, float], slots: dict[str, int]) -> None:
    bench = Bench(max_running=8, weights=weights)
    for tenant in "ab":
        bench.crowd(160, tenant)
    bench.steps(5)
    assert bench.running() == slots
    first = Counter(bench.finishing_tenants()[:160])
    assert abs(first["b"] / first["a"] - weights.get("b", 1.0)) < 0.5


def test_a_tenant_that_comes_late_is_served_next_and_has_no_claim_from_before() -> None:
    bench = Bench(max_running=1)
    bench.crowd(20)
    bench.steps(50)
    bench.crowd(3, "b")
    assert bench.finishing_tenants()[1:7] in ("bababa", "ababab")


def test_a_tenant_alone_uses_all_slots_and_another_gets_its_own_in_the_next_step() -> None:
    bench = Bench(max_running=4, prefix_cache=True)
    bench.crowd(12, max_tokens=400)
    bench.steps(50)
    assert bench.running() == {"a": 4}
    urgent = bench.add("b", max_tokens=10)
    for written in range(1, 11):
        bench.steps(1)
        assert len(urgent.output) == written
    bench.crowd(3, "b", max_tokens=400)
    bench.steps(1)
    assert bench.running() == {"a": 2, "b": 2}
    bench.add("c", max_tokens=400)
    bench.steps(1)
    assert bench.running()["c"] == 1


def test_more_tenants_than_slots_take_turns() -> None:
    bench = Bench(max_running=1, prefix_cache=True)
    first, second = bench.add("a", max_tokens=2000), bench.add("b", max_tokens=2000)
    bench.steps(1000)
    assert abs(len(first.output) - len(second.output)) <= QUANTUM
    assert 4 <= first.stats.preemptions <= 1000 / QUANTUM * 2
    assert 900 < len(first.output) + len(second.output) <= 1000


def test_scheduling_takes_no_longer_with_many_tenants_that_wait() -> None:
    """The sums over all tenants that it once had took hundreds of times as many calls."""

    def calls(waiting: int) -> int:
        bench = Bench(max_running=16)
        for number in range(16 + waiting):
            bench.add(str(number), max_tokens=1000)
        bench.steps(5)
        return calls_of(bench.scheduler.schedule)

    assert calls(1000) < 2 * calls(16)


def test_priority_orders_within_a_tenant_and_takes_nothing_from_another() -> None:
    bench = Bench(max_running=4)
    bench.crowd(6, "b", max_tokens=300)
    bench.steps(1)
    bench.crowd(6, "a", max_tokens=300, priority=10)
    low, high = bench.add("b", max_tokens=300, priority=-1), bench.add("b", max_tokens=300, priority=1)
    for _ in range(20):
        bench.steps(1)
        assert bench.running() == {"a": 2, "b": 2}
    bench.steps_until(lambda: high.output)
    assert low.output == []


def test_memory_that_a_tenant_holds_beyond_its_share_is_given_up_for_another() -> None:
    bench = Bench(max_running=4, pages=60)
    hogs = bench.crowd(4, prompt=200, max_tokens=50)
    bench.steps(1)
    assert len(bench.scheduler.running) > 2
    guest = bench.add("b", prompt=200, max_tokens=50)
    bench.steps(1)
    assert guest.committed > 0
    bench.finishing_order()
    assert [len(s.output) for s in (*hogs, guest)] == [50] * 5


def test_going_idle_forgives_nothing() -> None:
    bench = Bench(max_running=1)
    steady = bench.add("b", max_tokens=3000)
    bench.steps(1)
    for _ in range(5):
        burst = bench.add("a", max_tokens=100)
        bench.steps_until(lambda burst=burst: burst.state is SequenceState.FINISHED)  # type: ignore[misc]
    assert len(steady.output) >= 5 * 100 - QUANTUM


def test_a_head_that_does_not_fit_is_not_overtaken_for_ever() -> None:
    bench = Bench(pages=53)
    bench.add("a", prompt=500, max_tokens=20)
    large = bench.add("b", prompt=800, max_tokens=20)
    bench.crowd(30, prompt=20, max_tokens=20)
    assert bench.finishing_tenants().index("b") <= 1
    assert len(large.output) == 20


def test_priority_comes_first_but_not_for_ever() -> None:
    bench = Bench(max_running=1)
    old = bench.add(arrived_at=0.0)
    high = bench.add(priority=2, arrived_at=2 * PRIORITY_SECONDS - 1)
    late = bench.add(priority=2, arrived_at=2 * PRIORITY_SECONDS + 1)
    low = bench.add(priority=-1, arrived_at=PRIORITY_SECONDS - 1)
    assert bench.finishing_order() == [high, old, late, low]


def test_memory_is_taken_from_the_lowest_priority_and_then_from_the_newest() -> None:
    bench = Bench(pages=20)
    low = bench.add(priority=-1, max_tokens=300)
    old, newer, newest = bench.add(max_tokens=300), bench.add(max_tokens=10), bench.add(max_tokens=300)
    bench.steps_until(lambda: low.stats.preemptions)
    assert newer.state is SequenceState.FINISHED
    assert bench.scheduler.running == [old, newest]
    bench.steps_until(lambda: newest.stats.preemptions)
    assert bench.scheduler.running == [old]
    assert old.stats.preemptions == 0
    newcomer = bench.add()
    bench.scheduler.finish(old)
    bench.steps(1)
    assert bench.scheduler.running == [newest, newcomer]  # both rank before the one of low priority
    bench.finishing_order()
    assert newcomer.stats.preemptions == 0
    assert [len(s.output) for s in (low, newer, newest)] == [300, 10, 300]


def test_deadlines_end_who_waits_and_who_runs() -> None:
    bench = Bench(max_running=1)
    running = bench.add(max_tokens=1000, deadline=110.0)
    waiting, patient = bench.add(deadline=105.0), bench.add()
    bench.steps(1)
    for before, at, sequence in ((104.9, 105.0, waiting), (109.9, 110.0, running)):
        assert bench.scheduler.overdue(before) == []
        assert bench.scheduler.overdue(at) == [sequence]
        bench.scheduler.finish(sequence)
    assert bench.scheduler.overdue(1e9) == []
    bench.steps(1)
    assert len(patient.output) == 1


def test_a_deadline_that_can_not_be_met_ends_the_wait() -> None:
    bench = Bench(max_running=1)
    bench.scheduler.step_seconds = 0.5
    bench.add(max_tokens=1000)
    bench.steps(1)
    hopeless, possible = bench.add(prompt=4000, deadline=103.0), bench.add(prompt=500, deadline=103.0)
    assert bench.scheduler.overdue(98.9) == []
    assert bench.scheduler.overdue(99.1) == [hopeless]  # eight chunks take four seconds
    bench.scheduler.finish(hopeless)
    assert bench.scheduler.overdue(102.4) == []
    assert bench.scheduler.overdue(102.6) == [possible]


def full() -> Bench:
    """A bench on which tenant a decodes in all slots, in every step, and more of its requests wait."""
    bench = Bench(max_running=8, prefix_cache=True)
    bench.crowd(24, prompt=20, max_tokens=1000)
    bench.steps(30)
    assert len(bench.step()) == 8
    return bench


def test_a_tenant_within_its_share_takes_part_in_every_step() -> None:
    bench = Bench(max_running=8)
    fair = bench.crowd(4, max_tokens=100)
    bench.steps(1)
    for written in range(1, 50):
        assert [len(s.output) for s in fair] == [written] * 4
        if written % 5 == 0:
            bench.add("b", prompt=10, max_tokens=3)
        bench.steps(1)


def test_slots_that_cannot_be_divided_evenly_are_not_held_against_anyone() -> None:
    bench = Bench(max_running=8)
    for tenant in "ab":
        bench.crowd(3, tenant, max_tokens=100)
    bench.steps(1)
    bench.crowd(2, "c", prompt=10)
    assert len(bench.step()) == 8


@pytest.mark.parametrize("prompt", [10, 128])
def test_others_prompts_take_no_more_than_three_steps_in_a_row(prompt: int) -> None:
    """Tenant b asks anew in every step, with answers of one token."""
    bench = full()
    skipped = longest = 0
    for _ in range(100):
        bench.add("b", prompt=prompt, max_tokens=1)
        tenants = {work.sequence.request.tenant for work in bench.step()}
        skipped = 0 if "a" in tenants else skipped + 1
        longest = max(longest, skipped)
    assert longest == 3


def test_a_prompt_of_several_steps_has_its_last_one_alone() -> None:
    bench = full()
    long = bench.add("b", prompt=300, max_tokens=3)
    works = [{work.sequence.request.tenant: work.tokens for work in bench.step()} for _ in range(3)]
    assert [work["b"] for work in works] == [128, 128, 44]
    assert ["a" in work for work in works] == [True, True, False]
    assert len(long.output) == 1
    assert len(bench.step()) == 8, "from the second token on, all take part"


@given(
    st.integers(1, 600), st.dictionaries(st.text(), st.tuples(st.integers(1, 900), st.floats(0.01, 100)), min_size=1)
)
def test_shares_are_fair_and_leave_nothing(tokens: int, tenants: dict[str, tuple[int, float]]) -> None:
    wanted = {tenant: want for tenant, (want, _) in tenants.items()}
    queue = FairQueue({tenant: weight for tenant, (_, weight) in tenants.items()})
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
            return [7] * min(accepted, left, sequence.request.drafting.max_nodes + 1)

        return self.bench.step(written)


TestScheduling = SchedulerMachine.TestCase
TestScheduling.settings = settings(stateful_step_count=30)
