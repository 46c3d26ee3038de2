"""Whatever a strategy does wrong, it is counted, logged once with its name, and switched off for that sequence."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftwood_strategies import Drafter, DraftTree, Feedback, create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import DraftStats, StepFeedback
from draftwood_strategies.draft import EMPTY_TREE, DraftTrees
from draftwood_strategies.draft_engine import controller as draft_account
from draftwood_strategies.draft_engine import guard as timed_calls
from draftwood_strategies.draft_engine.controller import (
    MAX_CALL_SECONDS,
    MAX_PAUSES,
    TRIED_SHARE,
    DraftCostModel,
    step_all,
)
from draftwood_strategies.draft_engine.engine import DraftEngine, DraftSession, Verifies, observe_all, propose_all
from draftwood_strategies.draft_engine.guard import GuardedDrafter, IndexingBudget
from draftwood_strategies.draft_engine.watchdog import Watchdog
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.mixing import hybrid as hybrid_module
from tests.strategies.fakes import Clock, FakeStrategy, hybrid_of, own_records

VOCAB = 100
STEP = 0.01
NOTHING = Feedback(np.array([1], np.int32), np.array([-1], np.int32), np.array([2], np.int32))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timed_calls, "time", clock)
    monkeypatch.setattr(draft_account, "_called", set())
    return clock


@dataclass(frozen=True)
class Asked:
    """A `DraftedRequest`."""

    drafting: Drafting
    learns: bool = True
    request_id: str = "r1"
    prompt: Int32Array = field(default_factory=lambda: np.array([1, 2, 3], np.int32))


def sequence_of(strategy: Any) -> DraftSession:
    return DraftSession(Asked(Drafting("theirs", max_nodes=16)), DraftStats(), strategy)


class LoneDrafter(GuardedDrafter):
    """The drafter of a sequence that is asked alone, as a step's only one."""

    def __init__(
        self,
        strategy: Any,
        cost_model: DraftCostModel | None = None,
        watchdog: Watchdog | None = None,
        learns: bool = True,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.request = Asked(Drafting("theirs", max_nodes=16), learns)
        cost_model = cost_model or DraftCostModel()
        super().__init__(self.request, strategy, DraftStats(), VOCAB, self.failures, cost_model, watchdog)

    def propose(self, budget: int) -> DraftTree:
        if budget <= 0 or not self.ready(IndexingBudget()):
            return EMPTY_TREE
        return propose_all([self], np.array([budget], np.int32))[0]

    def observe(self, accepted: list[int], feedback: Feedback) -> None:
        offsets = np.array([0, len(accepted)], np.int32)
        observe_all([self], np.array(accepted, np.int32), offsets, StepFeedback.of(feedback))


def step(drafter: GuardedDrafter, seconds: float, accepted: int, sharing: int = 1, verifying: float = 0.0) -> None:
    """A step of the model in which the sequence wrote tokens."""
    step_all([drafter.account], seconds, np.array([accepted], np.int32), np.array([verifying]), sharing)


def run(drafter: LoneDrafter, steps: int, accepted: int, seconds: float = STEP) -> int:
    """Steps as the engine's, in which the model takes `seconds`; returns how many were drafted for."""
    drafted = 0
    for _ in range(steps):
        found = accepted if len(drafter.propose(16)) else 0
        drafted += drafter.drafting
        drafter.stats.decode_steps += 1
        step(drafter, seconds, found)
        drafter.observe([7] * (found + 1), NOTHING)
    return drafted


MALFORMED = {
    "nothing": object(),
    "lists": SimpleNamespace(tokens=[1], parents=[-1], scores=[1.0]),
    "vocabulary": DraftTree.of([VOCAB]),
    "too many": DraftTree.of(range(17)),
    "far too many": DraftTree(np.zeros(10**6, np.int32), np.full(10**6, -1, np.int32), np.zeros(10**6, np.float32)),
}


@pytest.mark.parametrize("proposed", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_tree_switches_off(proposed: Any, caplog: pytest.LogCaptureFixture) -> None:
    plugin = FakeStrategy(proposed)
    drafter = LoneDrafter(plugin)
    assert len(drafter.propose(16)) == 0
    assert len(drafter.propose(16)) == 0
    drafter.observe([5], NOTHING)
    drafter.close()
    assert (plugin.proposed, plugin.closed) == (1, 1)
    assert drafter.failures == {"theirs": 1}
    assert [("'theirs'" in r.message, r.levelno) for r in own_records(caplog)] == [(True, logging.ERROR)]
    assert drafter.stats.drafting_disabled_reason.startswith("propose raised ")


@pytest.mark.parametrize("call", ["start", "propose", "observe", "close"])
@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError()])
def test_a_strategy_ends_no_process(call: str, error: BaseException) -> None:
    class Ending(FakeStrategy):
        def _do(self, done: str) -> None:
            if done == call:
                raise error

    drafter = LoneDrafter(Ending())
    drafter.propose(16)
    drafter.observe([5, 7], NOTHING)
    drafter.close()
    assert drafter.failures == {"theirs": 1}
    assert f"{call} raised ExitedError: {type(error).__name__}" in drafter.stats.drafting_disabled_reason


@pytest.mark.parametrize("name", ["propose_all", "observe_all", "set_model_table", "start_read_only"])
def test_a_property_that_raises_is_the_strategys_own_fault(name: str) -> None:
    """Whether a strategy offers something is asked by its attributes, which may be anything."""

    class Odd(FakeStrategy):
        def __getattribute__(self, asked: str) -> Any:
            if asked == name:
                raise RuntimeError("broken")
            return super().__getattribute__(asked)

    odd = Odd()
    both = [LoneDrafter(odd), LoneDrafter(FakeStrategy())]
    assert all(drafter.ready(IndexingBudget()) for drafter in both)
    trees = propose_all(both, np.array([16, 16], np.int32))
    assert len(trees[1]) == 2
    observe_all(both, np.array([5, 5], np.int32), np.array([0, 1, 2], np.int32), None)
    drafts = DraftEngine(VOCAB, Verifies.TREES, None)
    drafts.model_table = np.empty((0, 11), np.int32)
    drafts.begin(sequence_of(odd), odd, None, [])


def test_what_is_only_laid_out_otherwise_is_taken() -> None:
    """Foreign classes, arrays that are not contiguous or not writable."""
    wide = np.array([[5, 0], [6, 0]], np.int32)
    frozen = np.array([0.9, 0.8], np.float32)
    frozen.flags.writeable = False
    drafter = LoneDrafter(
        FakeStrategy(SimpleNamespace(tokens=wide[:, 0], parents=np.array([-1, 0], np.int32), scores=frozen))
    )
    drafted = drafter.propose(16)
    assert drafted.tokens.tolist() == [5, 6]
    assert type(drafted) is DraftTree
    assert drafter.stats.drafting_disabled_reason == ""


@pytest.mark.parametrize("top_k", [-1, VOCAB + 1])
def test_a_strategy_that_asks_for_more_than_there_is_never_starts(top_k: int) -> None:
    drafter = LoneDrafter(FakeStrategy(top_k=top_k))
    assert (len(drafter.propose(4)), drafter.top_k) == (0, 0)
    assert not drafter.active
    assert f"start raised ValueError: top_k: {top_k} is not allowed" in drafter.stats.drafting_disabled_reason


@pytest.mark.parametrize("asked", [True, False])
def test_a_drafter_starts_when_it_is_asked_first_or_at_the_end_and_is_told_what_was_written_before(asked: bool) -> None:
    """Its prompt is its own, and may be written to."""
    told: list[Any] = []

    class Listening(FakeStrategy):
        def start(self, prompt: Int32Array) -> Drafter:
            told.append(prompt.tolist())
            prompt.fill(0)
            return self

        def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
            told.append((accepted.tolist(), feedback))

    plugin = Listening(top_k=2)
    LoneDrafter(plugin).close()
    assert (told, plugin.closed) == ([], 0), "a sequence that wrote nothing"
    drafter = LoneDrafter(plugin)
    drafter.observe([7], NOTHING)
    drafter.observe([8], NOTHING)
    assert (told, drafter.top_k) == ([], 0)
    if asked:
        assert len(drafter.propose(4)) == 2
        assert drafter.top_k == 2
        drafter.observe([9], NOTHING)
    drafter.close()
    assert told == [[1, 2, 3], ([7, 8], None), *([([9], NOTHING)] if asked else [])]
    assert plugin.closed == 1
    assert drafter.request.prompt.tolist() == [1, 2, 3]


def test_a_strategy_that_cannot_read_drafts_nothing_for_a_request_that_must_not_be_learned() -> None:
    plugin = FakeStrategy()
    drafter = LoneDrafter(plugin, learns=False)
    assert len(drafter.propose(4)) == 0
    drafter.close()
    assert plugin.proposed == plugin.closed == 0
    assert drafter.stats.drafting_disabled_reason == "theirs cannot draft without learning"


def test_a_close_that_fails_after_another_failure_keeps_the_first_reason() -> None:
    plugin = FakeStrategy(object())
    plugin.close = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    drafter = LoneDrafter(plugin)
    drafter.propose(4)
    assert drafter.stats.drafting_disabled_reason.startswith("propose raised AttributeError")
    assert drafter.failures == {"theirs": 1}


@pytest.mark.parametrize("call", ["propose", "observe"])
@pytest.mark.parametrize("cost", [2.5, 40.0])
def test_drafting_that_takes_longer_than_it_saves_is_suspended_and_tried_again(
    clock: Clock, call: str, cost: float, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not at fault: other text, or a smaller batch, may make it pay."""
    seconds: dict[str, Any] = {call: cost * STEP}
    plugin = FakeStrategy(clock=clock, **seconds)
    drafter = LoneDrafter(plugin)
    began = clock.now
    assert 1 <= run(drafter, 100, accepted=1) < 15
    drafted = run(drafter, 20_000, accepted=1)
    assert drafted > 0
    assert clock.now - began < (20_100 * 1.25 * TRIED_SHARE + 15 * cost) * STEP
    assert (drafter.active, drafter.stats.suspensions > 0) == (True, True)
    assert (drafter.failures, drafter.stats.drafting_disabled_reason, own_records(caplog)) == ({}, "", [])
    plugin.seconds[call] = 0.1 * STEP
    run(drafter, 5_000, accepted=1)
    assert run(drafter, 100, accepted=1) == 100, "now it pays"


def test_drafting_that_pays_goes_on_however_long_it_takes(clock: Clock) -> None:
    drafter = LoneDrafter(FakeStrategy(clock=clock, propose=3 * STEP))
    assert run(drafter, 400, accepted=4) == 400


def test_cheap_drafting_that_brings_nothing_is_tried_now_and_then_until_it_pays(clock: Clock) -> None:
    drafter = LoneDrafter(FakeStrategy(clock=clock, propose=0.1 * STEP, observe=0.1 * STEP))
    often, seldom = (2000 / (1 + longest) for longest in MAX_PAUSES)
    assert 0.5 * often < run(drafter, 2000, accepted=0) < often, "until the tenant's mean is about 64 drafts"
    assert 0.9 * seldom < run(drafter, 2000, accepted=0) < 1.1 * seldom
    assert drafter.active
    run(drafter, 100, accepted=3)
    assert run(drafter, 100, accepted=3) == 100


def test_where_a_tenant_s_drafts_pay_elsewhere_they_are_tried_more_often(clock: Clock) -> None:
    cost_model = DraftCostModel()
    elsewhere = LoneDrafter(FakeStrategy(clock=clock, propose=0.1 * STEP), cost_model=cost_model)
    drafter = LoneDrafter(FakeStrategy(clock=clock, propose=0.1 * STEP, observe=0.1 * STEP), cost_model=cost_model)
    drafted = 0
    for _ in range(2000):
        run(elsewhere, 1, accepted=3)
        drafted += run(drafter, 1, accepted=0)
    often = 2000 / (1 + MAX_PAUSES[0])
    assert often < drafted < 1.5 * often


def test_a_sequence_expects_what_the_tenant_s_earlier_ones_brought(clock: Clock) -> None:
    """The first sequence hopes; the next one knows, and still finds out at once where its own text is better."""
    cost_model = DraftCostModel()
    plugin = FakeStrategy(clock=clock, propose=0.1 * STEP, observe=0.1 * STEP)
    drafted = []
    for _ in range(4):
        drafter = LoneDrafter(plugin, cost_model=cost_model)
        drafted.append(run(drafter, 100, accepted=0))
    assert drafted[0] > 15
    assert max(drafted[1:]) <= 10  # at 0, 2, 6, 14, 30, 46 steps and so on
    drafter = LoneDrafter(plugin, cost_model=cost_model)
    assert run(drafter, 100, accepted=3) == 100
    other = LoneDrafter(plugin)
    assert run(other, 100, accepted=0) > 15, "another tenant's drafts say nothing"


def test_steps_without_a_draft_say_nothing_about_drafts(clock: Clock) -> None:
    drafter = LoneDrafter(FakeStrategy(clock=clock, observe=0.01 * STEP))
    run(drafter, 10, accepted=1)
    for _ in range(500):  # as beside prompts
        step(drafter, STEP, 0)
        drafter.observe([7], NOTHING)
    assert run(drafter, 20, accepted=1) == 20


def test_what_is_written_in_a_pause_is_told_before_the_next_draft_and_the_end(clock: Clock) -> None:
    class Attentive(FakeStrategy):
        told = 0

        def propose(self, budget: int) -> DraftTree:
            assert self.told == drafter.stats.decode_steps
            return super().propose(budget)

        def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
            assert feedback is None or accepted.shape[0] == 1
            self.told += accepted.shape[0]

    plugin = Attentive(clock=clock, propose=0.1 * STEP, top_k=4)
    drafter = LoneDrafter(plugin)
    in_pauses = []
    for _ in range(300):
        run(drafter, 1, accepted=0)
        if plugin.told < drafter.stats.decode_steps:
            in_pauses.append(drafter.top_k)
    assert drafter.active
    assert in_pauses == [0] * len(in_pauses)
    assert len(in_pauses) > 150
    drafter.close()
    assert plugin.told == drafter.stats.decode_steps


def test_the_prompt_s_time_is_no_measure_of_a_step(clock: Clock) -> None:
    drafter = LoneDrafter(FakeStrategy(clock=clock, propose=5 * STEP))
    run(drafter, 1, accepted=0, seconds=100 * STEP)
    assert run(drafter, 100, accepted=1) < 15


def test_one_call_that_holds_up_everybody_ends_it(clock: Clock) -> None:
    plugin = FakeStrategy(clock=clock)
    drafter = LoneDrafter(plugin)
    run(drafter, 500, accepted=4)
    plugin.seconds["propose"] = 1.5
    assert run(drafter, 10, accepted=4) == 1
    assert "one call took 1.5 s" in drafter.stats.drafting_disabled_reason


def test_the_first_call_of_a_class_may_compile(clock: Clock) -> None:
    plugin = FakeStrategy(clock=clock, start=30.0, propose=30.0, observe=30.0)
    drafter = LoneDrafter(plugin)
    assert run(drafter, 1, accepted=0) == 1
    plugin.seconds.clear()
    assert run(drafter, 50, accepted=0) == 50
    plugin.seconds["start"] = 30.0
    drafter = LoneDrafter(plugin)
    assert run(drafter, 5, accepted=0) == 1, "the second start is charged"


def test_a_token_outside_the_vocabulary_costs_a_hybrid_one_part() -> None:
    good, bad = FakeStrategy(DraftTree.of([5])), FakeStrategy(DraftTree.of([VOCAB]))
    strategy = hybrid_of(good=good, bad=bad)
    drafter = LoneDrafter(strategy)
    for _ in range(3):
        assert drafter.propose(4).tokens.tolist() == [5]
        drafter.observe([5, 7], NOTHING)
    assert (strategy.failures, drafter.failures) == ({"bad": 1}, {})
    assert (good.proposed, bad.proposed, bad.closed) == (3, 1, 1)
    assert drafter.stats.drafting_disabled_reason == ""


def test_of_a_hybrid_the_part_with_a_call_that_hung_is_dropped(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hybrid_module, "time", clock)
    quick, slow = FakeStrategy(DraftTree.of([7, 8]), clock=clock), FakeStrategy(clock=clock)
    strategy = hybrid_of(quick=quick, slow=slow)
    drafter = LoneDrafter(strategy)
    run(drafter, 5, accepted=2)
    slow.seconds["propose"] = 1.5 * MAX_CALL_SECONDS
    run(drafter, 1, accepted=2)
    assert (slow.closed, quick.closed, strategy.failures) == (1, 0, {"slow": 1})
    assert [record.getMessage() for record in own_records(caplog)] == [
        "source 'slow' is dropped for one sequence: a call took too long"
    ]
    asked = slow.proposed
    assert run(drafter, 20, accepted=2) == 20
    assert (slow.proposed, drafter.active, drafter.failures) == (asked, True, {})


def test_a_slow_part_of_a_hybrid_is_suspended_for_all_sequences_and_tried_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hybrid_module, "time", clock)
    slow, quick = FakeStrategy(clock=clock, propose=5 * STEP), FakeStrategy(DraftTree.of([5]))
    strategy = hybrid_of(quick=quick, slow=slow)
    made = [LoneDrafter(strategy) for _ in range(3)]
    for drafter in made:
        run(drafter, 100, accepted=0)
    asked = slow.proposed
    assert 0 < asked < 30, "together, not each"
    assert (slow.closed, strategy.schedule.suspensions) == (0, {"slow": 1})
    assert quick.proposed > 10
    for _ in range(100):
        run(made[0], 1000, accepted=0)
        if slow.proposed > asked:
            break
    assert slow.proposed > asked, "it is tried again"
    for drafter in made:
        assert drafter.active
        drafter.close()
        assert drafter.stats.by_source.keys() <= {"quick", "slow"}
        assert drafter.stats.drafting_disabled_reason == ""
    assert (strategy.failures, own_records(caplog)) == ({}, [])


class InBatches(FakeStrategy):
    """Starts these drafters one after the other, and fails as a whole where one takes part that does."""

    def __init__(self, *drafters: FakeStrategy) -> None:
        super().__init__()
        self.left = [*drafters]

    def start(self, prompt: Int32Array) -> Drafter:
        return self.left.pop(0)

    def propose_all(self, drafters: list[FakeStrategy], budgets: Int32Array) -> DraftTrees:
        return DraftTrees.of([drafter.propose(16) for drafter in drafters])

    def observe_all(self, drafters: list[FakeStrategy], accepted: Int32Array, offsets: Int32Array, _: Any) -> None:
        for drafter in drafters:
            drafter.observe(accepted, None)


def test_a_batch_that_fails_is_asked_one_by_one_and_costs_those_that_fail_their_drafts() -> None:
    raising = (FakeStrategy(raises_in=call) for call in ("propose", "observe"))
    strategy = InBatches(FakeStrategy(), *raising, FakeStrategy(DraftTree.of([VOCAB])))
    drafters = [LoneDrafter(strategy) for _ in range(4)]
    assert all(drafter.ready(IndexingBudget()) for drafter in drafters)
    trees = propose_all(drafters, np.full(4, 16, np.int32))
    assert [tree.tokens.tolist() for tree in trees] == [[5, 6], [], [5, 6], []]
    observe_all(drafters, np.full(4, 5, np.int32), np.arange(5, dtype=np.int32), None)
    alone = LoneDrafter(InBatches(FakeStrategy(raises_in="observe")))
    alone.propose(16)
    alone.observe([5], NOTHING)
    reasons = [drafter.stats.drafting_disabled_reason.partition(":")[0] for drafter in [*drafters, alone]]
    propose, observe = (f"{call} raised RuntimeError" for call in ("propose", "observe"))
    assert reasons == ["", propose, observe, "propose raised MalformedTreeError", observe]


def test_sequences_of_several_strategies_are_asked_together(clock: Clock) -> None:
    """Those of one strategy in one call, whose time they share; the others one by one."""
    trie, plugin = create("trie"), FakeStrategy(DraftTree.of([5]), clock=clock, propose=0.3)
    calls: list[int] = []
    batch = trie.propose_all  # type: ignore[attr-defined]

    def counted(drafters: Any, budgets: Int32Array) -> Any:
        calls.append(len(drafters))
        clock.now += 0.2
        return batch(drafters, budgets)

    trie.propose_all = counted  # type: ignore[attr-defined]
    drafters = [LoneDrafter(strategy) for strategy in (trie, plugin, trie)]
    for _ in range(2):  # the first call of a class is not charged
        assert all(drafter.ready(IndexingBudget()) for drafter in drafters)
        trees = propose_all(drafters, np.full(3, 4, np.int32))
        assert (len(trees), trees[1].tokens.tolist()) == (3, [5])
        feedback = StepFeedback(
            tokens=np.array([1, 1, 5, 1], np.int32),
            parents=np.array([-1, -1, 0, -1], np.int32),
            predictions=np.array([1, 2, 3, 2], np.int32),
            top_tokens=None,
            offsets=np.array([0, 1, 3, 4], np.int32),
        )
        observe_all(drafters, np.array([1, 2, 2, 3], np.int32), np.array([0, 1, 2, 4], np.int32), feedback)
    assert calls == [2, 2]
    assert [drafter.stats.draft_seconds for drafter in drafters] == pytest.approx([0.2, 0.6, 0.2])
    assert trie.tokens == 6, "each sequence of the trie was told what it wrote"  # type: ignore[attr-defined]


def test_a_debt_is_forgiven_with_the_pause_that_makes_up_for_it() -> None:
    account = draft_account.DraftAccount(DraftCostModel())
    rows = draft_account.rows_of([account])
    for _ in range(3):
        step_all([account], STEP, np.array([0], np.int32), np.zeros(1), 1)
    draft_account.charge_all(rows, 10 * STEP)
    assert draft_account.overdrawn(rows) == []
    for _ in range(40):
        draft_account.charge_all(rows, STEP)
    assert draft_account.overdrawn(rows) == [0]
    assert account.suspend() == pytest.approx(50 / TRIED_SHARE, abs=1)
    assert account.suspended
    assert draft_account.overdrawn(rows) == []
