"""What drafts gain against what they cost: for one sequence, and for many slow drafters together."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_strategies import DraftTree
from draftwood_strategies.base import StepFeedback
from draftwood_strategies.draft_engine import controller, guard
from draftwood_strategies.draft_engine.controller import (
    DraftAccount,
    DraftCostModel,
    charge_all,
    pause_all,
    rows_of,
    step_all,
    worth_drafting_ahead,
)
from draftwood_strategies.draft_engine.engine import Ask, DraftEngine, NoDraft, Verifies, added_seconds
from draftwood_strategies.draft_engine.guard import IndexingBudget
from draftwood_strategies.draft_engine.step_times import MeasuredStepTimes, StepSize, StepTimeCurve
from tests.strategies.draft_engine.test_guard import NOTHING, VOCAB, LoneDrafter, sequence_of, step
from tests.strategies.fakes import Clock, FakeStrategy

BATCH, MODEL_SECONDS, STEPS = 32, 0.034, 64


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(guard, "time", clock)
    monkeypatch.setattr(
        controller, "_called", {(FakeStrategy, "start"), (FakeStrategy, "propose"), (FakeStrategy, "observe")}
    )
    return clock


def drafting_seconds(clock: Clock, propose: float, accepted: int, stalls: int = 0) -> tuple[float, int]:
    """What drafting takes over a whole batch, and how many sequences it was suspended for."""
    cost_model = DraftCostModel()
    drafters = [LoneDrafter(FakeStrategy(clock=clock, propose=propose), cost_model) for _ in range(BATCH)]
    for drafter in drafters:  # the first token of each waits for no draft
        step(drafter, MODEL_SECONDS, 0, sharing=BATCH)
    started = clock.now
    for number in range(STEPS):
        for drafter in drafters:
            drafter.propose(16)
            if number < stalls:
                charge_all(rows_of([drafter.account]), 0.1)
        for drafter in drafters:
            step(drafter, MODEL_SECONDS, accepted, sharing=BATCH)
            drafter.observe([7] * (accepted + 1), NOTHING)
    assert not any(drafter.failures for drafter in drafters)
    return clock.now - started, sum(drafter.stats.suspensions > 0 for drafter in drafters)


def test_slow_drafters_of_a_large_batch_are_suspended_before_they_cost_a_multiple(clock: Clock) -> None:
    """Each is cheap next to a step, all together are not: a step of 34 ms with 32 drafts of 5 ms takes 194 ms."""
    seconds, suspended = drafting_seconds(clock, propose=0.005, accepted=1)
    assert suspended == BATCH
    assert seconds < STEPS * MODEL_SECONDS / 2
    seconds, suspended = drafting_seconds(clock, propose=0.0005, accepted=1)
    assert suspended == 0
    assert seconds == pytest.approx(STEPS * BATCH * 0.0005)
    assert drafting_seconds(clock, propose=0.0005, accepted=1, stalls=1)[1] == 0, "one stall of the machine"
    assert drafting_seconds(clock, propose=0.0005, accepted=1, stalls=4)[1] == BATCH


@pytest.mark.parametrize(("verifying", "pays"), [(0.0005, True), (0.002, False)])
def test_a_draft_pauses_that_costs_more_to_verify_than_it_saves(verifying: float, pays: bool) -> None:
    """Each step takes 3 ms, its draft included, and each draft saves one token: a step without a draft."""
    account = DraftAccount(DraftCostModel())
    for _ in range(12):
        charge_all(rows_of([account]), 0.0001)
        step_all([account], 0.003, np.ones(1, np.int32), np.array([verifying]), sharing=1)
        pauses = pause_all([account], [False])
    assert (pauses == [0]) == pays


@pytest.mark.parametrize(
    ("per_branch", "expected"), [(0.0, [3.0, 0.0, 2.0]), (2.0, [5.0, 0.0, 2.0])], ids=["nodes", "nodes and branches"]
)
def test_what_a_draft_costs_is_read_off_the_step_time_model(per_branch: float, expected: list[float]) -> None:
    times = MeasuredStepTimes(StepTimeCurve({1: 1.0, 64: 64.0}), per_branch=per_branch)
    parents, offsets = np.array([-1, 0, 0, 1, -1, -1, 0, 1], np.int32), np.array([0, 4, 5, 8], np.int32)
    feedback = StepFeedback(np.zeros(8, np.int32), parents, np.zeros(8, np.int32), None, offsets)
    seconds = added_seconds(times, np.array([3, 0, 2], np.int32), StepSize(8, 3), feedback)
    assert seconds.tolist() == pytest.approx(expected, rel=0.01)


class Drawn(FakeStrategy):
    """Proposes as many nodes as it is told to."""

    nodes = 2

    def propose(self, budget: int) -> DraftTree:
        return DraftTree.of(range(self.nodes), scores=[0.9] * self.nodes)


def test_a_row_without_a_draft_has_a_reason() -> None:
    times = MeasuredStepTimes(StepTimeCurve({1: 1.0, 2: 4.0, 64: 128.0}))
    drafts = DraftEngine(VOCAB, Verifies.TREES, times)
    strategy = Drawn()
    session = sequence_of(strategy)
    assert session.no_draft is NoDraft.NOT_ASKED
    drafts.begin(session, strategy, None, [])

    def step(accepted: int) -> NoDraft | None:
        assert session.drafter is not None
        asks = [Ask(0, session, 16)] if session.drafter.ready(IndexingBudget()) else []
        trees = drafts.propose(asks, 1, 1)
        min_score = drafts.worthwhile(trees, 1).min_score
        session.drafted = int((trees.scores >= min_score).sum())
        reason = session.no_draft
        drafts.observe([session], np.array([accepted], np.int32), StepSize(1 + session.drafted, 1), 1.0)
        drafts.learn([session], np.zeros(1 + accepted, np.int32), np.array([0, 1 + accepted], np.int32))
        return reason

    assert step(0) is NoDraft.BATCH_FULL  # two tokens take four times as long as one
    strategy.nodes = 0
    session.drafter.pause(0)  # type: ignore[union-attr]
    assert step(0) is NoDraft.MEMORY_EMPTY
    times.observe(StepSize(2, 1), 1.0)
    session.drafter.pause(3)  # type: ignore[union-attr]
    assert step(0) is NoDraft.DOES_NOT_PAY
    session.drafter.failed("propose", ValueError("broken"))  # type: ignore[union-attr]
    assert step(0) is NoDraft.FAILED
    drafts.end(session)
    assert session.stats.no_draft == "off: the strategy failed"


@pytest.mark.parametrize(
    ("drafted", "worth", "sharing", "nodes"), [(0, 0, 8, 2), (0, 0, 256, 1), (16, 8, 1, 11), (16, 16, 1, 32)]
)
def test_drafts_ahead_have_room_for_what_was_worth_its_time_and_some_more(
    drafted: int, worth: int, sharing: int, nodes: int
) -> None:
    assert worth_drafting_ahead(64, drafted, worth, sharing) == nodes
