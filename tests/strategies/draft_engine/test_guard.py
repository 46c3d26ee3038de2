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

from draftwood_strategies import Drafter, DraftTree, Feedback, HybridStrategy, create, registry
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import DraftStats, StepFeedback
from draftwood_strategies.draft import EMPTY_TREE
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
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.mixing import hybrid as hybrid_module
from tests.strategies.fakes import Clock, FakeStrategy

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


def sequence_of(strategy: Any, name: str = "theirs", learns: bool = True) -> DraftSession:
    return DraftSession(Asked(Drafting(name, max_nodes=16), learns), DraftStats(), strategy)


class LoneDrafter(GuardedDrafter):
    """The drafter of a sequence that is asked alone, as a step's only one."""

    def __init__(
        self, sequence: DraftSession, failures: Counter[str], cost_model: DraftCostModel, watchdog: Any = None
    ) -> None:
        super().__init__(sequence.request, sequence.strategy, sequence.stats, VOCAB, failures, cost_model, watchdog)

    def propose(self, budget: int) -> DraftTree:
        if budget <= 0 or not self.ready(IndexingBudget()):
            return EMPTY_TREE
        return propose_all([self], np.array([budget], np.int32))[0]

    def observe(self, accepted: list[int], feedback: Feedback) -> None:
        offsets = np.array([0, len(accepted)], np.int32)
        observe_all([self], np.array(accepted, np.int32), offsets, StepFeedback.of(feedback))


def guarded(
    strategy: Any, failures: Counter[str] | None = None, cost_model: DraftCostModel | None = None
) -> tuple[LoneDrafter, DraftSession]:
    sequence, failures = sequence_of(strategy), Counter() if failures is None else failures
    return LoneDrafter(sequence, failures, cost_model or DraftCostModel()), sequence


def step(drafter: GuardedDrafter, seconds: float, accepted: int, sharing: int = 1, verifying: float = 0.0) -> None:
    """A step of the model in which the sequence wrote tokens."""
    step_all([drafter.account], seconds, np.array([accepted], np.int32), np.array([verifying]), sharing)


def run(drafter: LoneDrafter, sequence: DraftSession, steps: int, accepted: int, seconds: float = STEP) -> int:
    """Steps as the engine's, in which the model takes `seconds`; returns how many were drafted for."""
    drafted = 0
    for _ in range(steps):
        found = accepted if len(drafter.propose(16)) else 0
        drafted += drafter.drafting
        sequence.stats.decode_steps += 1
        step(drafter, seconds, found)
        drafter.observe([7] * (found + 1), NOTHING)
    return drafted


def tree(tokens: Any, parents: Any, scores: Any, *types: Any) -> DraftTree:
    kinds = types or (np.int32, np.int32, np.float32)
    return DraftTree(*(np.array(a, t) for a, t in zip((tokens, parents, scores), kinds, strict=True)))


MALFORMED = {
    "nothing": object(),
    "lists": SimpleNamespace(tokens=[1], parents=[-1], scores=[1.0]),
    "token type": tree([1], [-1], [1], np.int64, np.int32, np.float32),
    "dimensions": tree([[1]], [[-1]], [[1.0]]),
    "no dimension": tree(1, -1, 1.0),
    "parent of itself": tree([1], [0], [0.5]),
    "vocabulary": tree([VOCAB], [-1], [0.5]),
    "siblings": tree([1, 1], [-1, -1], [0.5, 0.5]),
    "too many": tree(range(17), [-1] * 17, [0.5] * 17),
    "far too many": tree(np.zeros(10**6), np.full(10**6, -1), np.zeros(10**6)),
}


@pytest.mark.parametrize("proposed", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_tree_switches_off(proposed: Any, caplog: pytest.LogCaptureFixture) -> None:
    failures: Counter[str] = Counter()
    plugin = FakeStrategy(proposed)
    drafter, sequence = guarded(plugin, failures)
    assert len(drafter.propose(16)) == 0
    assert len(drafter.propose(16)) == 0
    drafter.observe([5], NOTHING)
    drafter.close()
    assert (plugin.proposed, plugin.closed) == (1, 1)
    assert failures == {"theirs": 1}
    assert [("'theirs'" in r.message, r.levelno) for r in caplog.records] == [(True, logging.ERROR)]
    assert sequence.stats.drafting_disabled_reason.startswith("propose raised ")


@pytest.mark.parametrize("call", ["start", "propose", "observe", "close"])
@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError()])
def test_a_strategy_ends_no_process(call: str, error: BaseException) -> None:
    class Ending(FakeStrategy):
        def _do(self, done: str) -> None:
            if done == call:
                raise error

    failures: Counter[str] = Counter()
    drafter, sequence = guarded(Ending(), failures)
    drafter.propose(16)
    drafter.observe([5, 7], NOTHING)
    drafter.close()
    assert failures == {"theirs": 1}
    assert f"{call} raised ExitedError: {type(error).__name__}" in sequence.stats.drafting_disabled_reason


@pytest.mark.parametrize("name", ["propose_all", "observe_all", "set_model_table", "start_read_only"])
def test_a_property_that_raises_is_the_strategys_own_fault(name: str) -> None:
    """Whether a strategy offers something is asked by its attributes, which may be anything."""

    class Odd(FakeStrategy):
        def __getattribute__(self, asked: str) -> Any:
            if asked == name:
                raise RuntimeError("broken")
            return super().__getattribute__(asked)

    drafter, sequence = guarded(Odd())
    other, _ = guarded(FakeStrategy())
    both = [drafter, other]
    assert all(drafter.ready(IndexingBudget()) for drafter in both)
    trees = propose_all(both, np.array([16, 16], np.int32))
    assert len(trees[1]) == 2
    observe_all(both, np.array([5, 5], np.int32), np.array([0, 1, 2], np.int32), None)
    drafts = DraftEngine(VOCAB, Verifies.TREES, None)
    drafts.model_table = np.empty((0, 11), np.int32)
    drafts.begin(sequence, sequence.strategy, None, [])


def test_what_is_only_laid_out_otherwise_is_taken() -> None:
    """Foreign classes, arrays that are not contiguous or not writable."""
    wide = np.array([[5, 0], [6, 0]], np.int32)
    frozen = np.array([0.9, 0.8], np.float32)
    frozen.flags.writeable = False
    drafter, sequence = guarded(
        FakeStrategy(SimpleNamespace(tokens=wide[:, 0], parents=np.array([-1, 0], np.int32), scores=frozen))
    )
    drafted = drafter.propose(16)
    assert drafted.tokens.tolist() == [5, 6]
    assert type(drafted) is DraftTree
    assert sequence.stats.drafting_disabled_reason == ""


@pytest.mark.parametrize("top_k", [-1, VOCAB + 1])
def test_a_strategy_that_asks_for_more_than_there_is_never_starts(top_k: int) -> None:
    drafter, sequence = guarded(FakeStrategy(top_k=top_k))
    assert (len(drafter.propose(4)), drafter.top_k) == (0, 0)
    assert not drafter.active
    assert f"start raised ValueError: top_k: {top_k} is not allowed" in sequence.stats.drafting_disabled_reason


@pytest.mark.parametrize("asked", [True, False])
def test_a_drafter_starts_when_it_is_asked_first_or_at_the_end_and_is_told_what_was_written_before(asked: bool) -> None:
    told: list[Any] = []

    class Listening(FakeStrategy):
        def start(self, prompt: Int32Array) -> Drafter:
            told.append(prompt.tolist())
            return self

        def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
            told.append((accepted.tolist(), feedback))

    plugin = Listening(top_k=2)
    drafter, _ = guarded(plugin)
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


def test_a_drafter_of_a_sequence_that_wrote_nothing_never_starts() -> None:
    plugin = FakeStrategy()
    drafter, _ = guarded(plugin)
    drafter.close()
    assert (plugin.closed, drafter.active) == (0, False)


def test_a_strategy_gets_a_prompt_of_its_own() -> None:
    plugin = FakeStrategy()

    def start(prompt: Int32Array) -> FakeStrategy:
        prompt.fill(0)
        return plugin

    plugin.start = start  # type: ignore[method-assign]
    drafter, sequence = guarded(plugin)
    assert len(drafter.propose(4)) == 2
    assert sequence.request.prompt.tolist() == [1, 2, 3]


def test_a_strategy_that_cannot_read_drafts_nothing_for_a_request_that_must_not_be_learned() -> None:
    plugin = FakeStrategy()
    sequence = sequence_of(plugin, "none", learns=False)
    drafter = LoneDrafter(sequence, Counter(), DraftCostModel())
    assert len(drafter.propose(4)) == 0
    drafter.close()
    assert plugin.proposed == plugin.closed == 0
    assert sequence.stats.drafting_disabled_reason == "none cannot draft without learning"


def test_a_close_that_fails_after_another_failure_keeps_the_first_reason() -> None:
    plugin, failures = FakeStrategy(object()), Counter[str]()
    plugin.close = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    drafter, sequence = guarded(plugin, failures)
    drafter.propose(4)
    assert sequence.stats.drafting_disabled_reason.startswith("propose raised AttributeError")
    assert failures == {"theirs": 1}


@pytest.mark.parametrize("call", ["propose", "observe"])
@pytest.mark.parametrize("cost", [2.5, 40.0])
def test_drafting_that_takes_longer_than_it_saves_is_suspended_and_tried_again(
    clock: Clock, call: str, cost: float, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not at fault: other text, or a smaller batch, may make it pay."""
    failures: Counter[str] = Counter()
    seconds: dict[str, Any] = {call: cost * STEP}
    plugin = FakeStrategy(clock=clock, **seconds)
    drafter, sequence = guarded(plugin, failures)
    began = clock.now
    assert 1 <= run(drafter, sequence, 100, accepted=1) < 15
    drafted = run(drafter, sequence, 20_000, accepted=1)
    assert drafted > 0
    assert clock.now - began < (20_100 * 1.25 * TRIED_SHARE + 15 * cost) * STEP
    assert (drafter.active, sequence.stats.suspensions > 0) == (True, True)
    assert (failures, sequence.stats.drafting_disabled_reason, caplog.records) == ({}, "", [])
    plugin.seconds[call] = 0.1 * STEP
    run(drafter, sequence, 5_000, accepted=1)
    assert run(drafter, sequence, 100, accepted=1) == 100, "now it pays"


def test_of_a_hybrid_the_part_with_a_call_that_hung_is_dropped(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hybrid_module, "time", clock)
    strategy = HybridStrategy(sources="none")
    quick, slow = FakeStrategy(DraftTree.of([7, 8]), clock=clock), FakeStrategy(clock=clock)
    strategy.parts = {"quick": quick, "slow": slow}
    failures: Counter[str] = Counter()
    drafter, sequence = guarded(strategy, failures)
    run(drafter, sequence, 5, accepted=2)
    slow.seconds["propose"] = 1.5 * MAX_CALL_SECONDS
    run(drafter, sequence, 1, accepted=2)
    assert (slow.closed, quick.closed, strategy.failures) == (1, 0, {"slow": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "source 'slow' is dropped for one sequence: a call took too long"
    ]
    asked = slow.proposed
    assert run(drafter, sequence, 20, accepted=2) == 20
    assert (slow.proposed, drafter.active, failures) == (asked, True, {})


def test_the_next_sequence_knows_that_drafts_are_too_expensive(clock: Clock) -> None:
    cost_model, plugin = DraftCostModel(), FakeStrategy(clock=clock, propose=2.5 * STEP)
    for number in range(5):
        drafter, sequence = guarded(plugin, cost_model=cost_model)
        drafted = run(drafter, sequence, 100, accepted=1)
        assert drafted <= (12 if number == 0 else 3)
    assert sequence.stats.suspensions > 0


def test_drafting_that_pays_goes_on_however_long_it_takes(clock: Clock) -> None:
    drafter, sequence = guarded(FakeStrategy(clock=clock, propose=3 * STEP))
    assert run(drafter, sequence, 400, accepted=4) == 400


def test_cheap_drafting_that_brings_nothing_is_tried_now_and_then_until_it_pays(clock: Clock) -> None:
    drafter, sequence = guarded(FakeStrategy(clock=clock, propose=0.1 * STEP, observe=0.1 * STEP))
    often, seldom = (2000 / (1 + longest) for longest in MAX_PAUSES)
    assert 0.5 * often < run(drafter, sequence, 2000, accepted=0) < often, "until the tenant's mean is about 64 drafts"
    assert 0.9 * seldom < run(drafter, sequence, 2000, accepted=0) < 1.1 * seldom
    assert drafter.active
    run(drafter, sequence, 100, accepted=3)
    assert run(drafter, sequence, 100, accepted=3) == 100


def test_where_a_tenant_s_drafts_pay_elsewhere_they_are_tried_more_often(clock: Clock) -> None:
    cost_model = DraftCostModel()
    elsewhere, written = guarded(FakeStrategy(clock=clock, propose=0.1 * STEP), cost_model=cost_model)
    drafter, sequence = guarded(
        FakeStrategy(clock=clock, propose=0.1 * STEP, observe=0.1 * STEP), cost_model=cost_model
    )
    drafted = 0
    for _ in range(2000):
        run(elsewhere, written, 1, accepted=3)
        drafted += run(drafter, sequence, 1, accepted=0)
    often = 2000 / (1 + MAX_PAUSES[0])
    assert often < drafted < 1.5 * often


def test_a_sequence_expects_what_the_tenant_s_earlier_ones_brought(clock: Clock) -> None:
    """The first sequence hopes; the next one knows, and still finds out at once where its own text is better."""
    cost_model = DraftCostModel()
    plugin = FakeStrategy(clock=clock, propose=0.1 * STEP, observe=0.1 * STEP)
    drafted = []
    for _ in range(4):
        drafter, sequence = guarded(plugin, cost_model=cost_model)
        drafted.append(run(drafter, sequence, 100, accepted=0))
    assert drafted[0] > 15
    assert max(drafted[1:]) <= 10  # at 0, 2, 6, 14, 30, 46 steps and so on
    drafter, sequence = guarded(plugin, cost_model=cost_model)
    assert run(drafter, sequence, 100, accepted=3) == 100
    other, written = guarded(plugin)
    assert run(other, written, 100, accepted=0) > 15, "another tenant's drafts say nothing"


def test_steps_without_a_draft_say_nothing_about_drafts(clock: Clock) -> None:
    drafter, sequence = guarded(FakeStrategy(clock=clock, observe=0.01 * STEP))
    run(drafter, sequence, 10, accepted=1)
    for _ in range(500):  # as beside prompts
        step(drafter, STEP, 0)
        drafter.observe([7], NOTHING)
    assert run(drafter, sequence, 20, accepted=1) == 20


def test_what_is_written_in_a_pause_is_told_before_the_next_draft_and_the_end(clock: Clock) -> None:
    class Attentive(FakeStrategy):
        told = 0

        def propose(self, budget: int) -> DraftTree:
            assert self.told == sequence.stats.decode_steps
            return super().propose(budget)

        def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
            assert feedback is None or accepted.shape[0] == 1
            self.told += accepted.shape[0]

    plugin = Attentive(clock=clock, propose=0.1 * STEP, top_k=4)
    drafter, sequence = guarded(plugin)
    in_pauses = []
    for _ in range(300):
        run(drafter, sequence, 1, accepted=0)
        if plugin.told < sequence.stats.decode_steps:
            in_pauses.append(drafter.top_k)
    assert drafter.active
    assert in_pauses == [0] * len(in_pauses)
    assert len(in_pauses) > 150
    drafter.close()
    assert plugin.told == sequence.stats.decode_steps


def test_the_prompt_s_time_is_no_measure_of_a_step(clock: Clock) -> None:
    drafter, sequence = guarded(FakeStrategy(clock=clock, propose=5 * STEP))
    run(drafter, sequence, 1, accepted=0, seconds=100 * STEP)
    assert run(drafter, sequence, 100, accepted=1) < 15


def test_one_call_that_holds_up_everybody_ends_it(clock: Clock) -> None:
    plugin = FakeStrategy(clock=clock)
    drafter, sequence = guarded(plugin)
    run(drafter, sequence, 500, accepted=4)
    plugin.seconds["propose"] = 1.5
    assert run(drafter, sequence, 10, accepted=4) == 1
    assert "one call took 1.5 s" in sequence.stats.drafting_disabled_reason


def test_the_first_call_of_a_class_may_compile(clock: Clock) -> None:
    plugin = FakeStrategy(clock=clock, start=30.0, propose=30.0, observe=30.0)
    drafter, sequence = guarded(plugin)
    assert run(drafter, sequence, 1, accepted=0) == 1
    plugin.seconds.clear()
    assert run(drafter, sequence, 50, accepted=0) == 50
    plugin.seconds["start"] = 30.0
    drafter, sequence = guarded(plugin)
    assert run(drafter, sequence, 5, accepted=0) == 1, "the second start is charged"


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a hybrid of these parts and of recycling."""
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    def make(**parts: FakeStrategy) -> HybridStrategy:
        for name, part in parts.items():
            registry.register(name)(lambda part=part: part)
        return HybridStrategy(sources=",".join([*parts, "recycling"]))

    return make


def test_a_token_outside_the_vocabulary_costs_a_hybrid_one_part(hybrid: Any) -> None:
    good, bad = FakeStrategy(DraftTree.of([5])), FakeStrategy(DraftTree.of([VOCAB]))
    strategy, failures = hybrid(good=good, bad=bad), Counter[str]()
    drafter, sequence = guarded(strategy, failures)
    for _ in range(3):
        assert set(drafter.propose(4).tokens.tolist()) == {5}
        drafter.observe([5, 7], Feedback(*(np.array(a, np.int32) for a in ([3, 5], [-1, 0], [5, 7], [[5] * 8] * 2))))
    assert (strategy.failures, failures) == ({"bad": 1}, {})
    assert (good.proposed, bad.proposed, bad.closed) == (3, 1, 1)
    assert sequence.stats.drafting_disabled_reason == ""


def run_hybrid(drafter: LoneDrafter, steps: int) -> None:
    """Steps whose drafts are all rejected."""
    nodes = (np.array(a, np.int32) for a in ([3], [-1], [7], [[7] * 8]))
    feedback = Feedback(*nodes)
    for _ in range(steps):
        assert drafter.active
        drafter.propose(16)
        step(drafter, STEP, 0)
        drafter.observe([7], feedback)


def test_a_slow_part_of_a_hybrid_is_suspended_for_all_sequences_and_tried_again(
    hybrid: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("draftwood_strategies.mixing.hybrid.time", clock)
    slow, quick = FakeStrategy(clock=clock, propose=5 * STEP), FakeStrategy(DraftTree.of([5]))
    strategy = hybrid(quick=quick, slow=slow)
    made = [guarded(strategy) for _ in range(3)]
    for drafter, _ in made:
        run_hybrid(drafter, 100)
    asked = slow.proposed
    assert 0 < asked < 30, "together, not each"
    assert (slow.closed, strategy.schedule.suspensions) == (0, {"slow": 1})
    assert quick.proposed > 10
    for _ in range(100):
        run_hybrid(made[0][0], 1000)
        if slow.proposed > asked:
            break
    assert slow.proposed > asked, "it is tried again"
    for drafter, sequence in made:
        drafter.close()
        assert sequence.stats.by_source.keys() <= {"quick", "slow", "recycling"}
        assert sequence.stats.drafting_disabled_reason == ""
    assert (strategy.failures, caplog.records) == ({}, [])


def test_a_call_of_a_part_that_holds_up_everybody_costs_a_hybrid_that_part(
    hybrid: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood_strategies.mixing.hybrid.time", clock)
    slow, quick = FakeStrategy(clock=clock), FakeStrategy(DraftTree.of([5]))
    strategy = hybrid(quick=quick, slow=slow)
    drafter, _ = guarded(strategy)
    run_hybrid(drafter, 1)
    slow.seconds["propose"] = 1.5
    run_hybrid(drafter, 100)
    assert (slow.closed, quick.closed, strategy.failures) == (1, 0, {"slow": 1})


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
    made = [guarded(strategy) for strategy in (trie, plugin, trie)]
    drafters, sequences = [drafter for drafter, _ in made], [sequence for _, sequence in made]
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
    assert [sequence.stats.draft_seconds for sequence in sequences] == pytest.approx([0.2, 0.6, 0.2])
    assert trie.tokens == 6, "each sequence of the trie was told what it wrote"  # type: ignore[attr-defined]


def test_a_paused_sequence_is_left_out_and_catches_up(clock: Clock) -> None:
    trie = create("trie")
    made = [guarded(trie)[0] for _ in range(2)]
    zeros = np.zeros(2, np.int32)
    feedback = StepFeedback(zeros, zeros - 1, zeros, None, np.array([0, 1, 2], np.int32))
    made[1]._pause = 1
    for step in range(2):
        asked = [drafter for drafter in made if drafter.ready(IndexingBudget())]
        assert len(asked) == 1 + step
        propose_all(asked, np.full(len(asked), 4, np.int32))
        observe_all(made, np.array([7, 8], np.int32), np.array([0, 1, 2], np.int32), feedback)
    assert sorted(tokens.tolist() for tokens in trie.sequences()) == [[7, 7], [8, 8]]  # type: ignore[attr-defined]


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
