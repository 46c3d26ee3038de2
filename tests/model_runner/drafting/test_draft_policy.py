"""How much to draft: limits of request and runner, and what many slow drafters may take together."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from draftwood_model_runner.drafting.draft_policy import DraftPolicy
from draftwood_model_runner.output import StepOutput
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.base import NO_LIMITS, DraftLimits
from draftwood_model_runner.runners.batch import BatchRow, Chains, lay_out, lay_out_trees
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import DraftTree
from draftwood_strategies.budgeting import draft_account, timed_calls
from draftwood_strategies.budgeting.draft_account import (
    DraftAccount,
    DraftCostModel,
    charge_all,
    pause_all,
    rows_of,
    step_all,
)
from draftwood_strategies.budgeting.step_time import ContextCost, StepTimeCurve, StepTimes
from draftwood_strategies.draft import EMPTY_TREE
from tests.model_runner.drafting.test_guarded_drafter import NOTHING, LoneDrafter, sequence_of, step
from tests.model_runner.sequences import make_sequence
from tests.strategies.fakes import Clock, FakeStrategy

BATCH, MODEL_SECONDS, STEPS = 32, 0.034, 64


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timed_calls, "time", clock)
    monkeypatch.setattr(
        draft_account, "_called", {(FakeStrategy, "start"), (FakeStrategy, "propose"), (FakeStrategy, "observe")}
    )
    return clock


def drafting_seconds(clock: Clock, propose: float, accepted: int, stalls: int = 0) -> tuple[float, int]:
    """What drafting takes over a whole batch, and how many sequences it was suspended for."""
    failures: Counter[str] = Counter()
    cost_model = DraftCostModel()
    sequences = [sequence_of(FakeStrategy(clock=clock, propose=propose)) for _ in range(BATCH)]
    drafters = [LoneDrafter(sequence, 100, failures, cost_model) for sequence in sequences]
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
    assert not failures
    return clock.now - started, sum(sequence.stats.suspensions > 0 for sequence in sequences)


def test_slow_drafters_of_a_large_batch_are_suspended_before_they_cost_a_multiple(clock: Clock) -> None:
    """Each is cheap next to a step, all together are not: a step of 34 ms with 32 drafts of 5 ms takes 194 ms."""
    seconds, suspended = drafting_seconds(clock, propose=0.005, accepted=1)
    assert suspended == BATCH
    assert seconds < STEPS * MODEL_SECONDS / 2
    seconds, suspended = drafting_seconds(clock, propose=0.0005, accepted=1)
    assert suspended == 0
    assert seconds == pytest.approx(STEPS * BATCH * 0.0005)


def test_one_stall_of_the_machine_suspends_nothing(clock: Clock) -> None:
    assert drafting_seconds(clock, propose=0.0005, accepted=1, stalls=1)[1] == 0
    assert drafting_seconds(clock, propose=0.0005, accepted=1, stalls=4)[1] == BATCH


class Thrifty(FakeStrategy):
    """Keeps to its budget."""

    def propose(self, budget: int) -> DraftTree:
        return super().propose(budget).pruned(budget)


def decoding(strategy: object, written: int, context: int = 3, **options: object) -> Sequence:
    """A sequence that wrote some tokens, all but the last committed."""
    fields: dict[str, object] = {"max_draft_nodes": 16, **options}
    prompt, stop = np.ones(context, np.int32), fields.pop("stop", StopParams(40))
    sequence = make_sequence("r", prompt, stop, strategy=strategy, **fields)  # type: ignore[arg-type]
    sequence.output = [1] * written
    sequence.committed = sequence.length - 1
    return sequence


def tree_of(policy: DraftPolicy, sequence: Sequence) -> DraftTree:
    """The draft as it is verified."""
    policy.start(sequence)
    drafts = policy.propose([ScheduledSequence(sequence, 1)], prompts_wait=False)
    pages, zero = np.arange(100, dtype=np.int32), np.zeros(1, np.int32)
    chains = Chains([pages], np.array([3], np.int32), np.array([1], np.int32), np.array([0, 1], np.int32), zero)
    batch = lay_out_trees(chains, drafts.trees, drafts.max_depths, 0.0)
    return DraftTree.of(batch.tokens[1:], batch.parents[1:] - 1)


def test_a_draft_keeps_to_the_limits_of_request_output_and_runner() -> None:
    chain = Thrifty(DraftTree.of(range(16), scores=np.linspace(0.9, 0.1, 16)))
    free = DraftPolicy(100, lambda _: NO_LIMITS, None)
    narrow = DraftPolicy(100, lambda _: DraftLimits(max_depth=4, max_nodes=9), None)
    assert len(tree_of(free, decoding(chain, written=1))) == 16
    assert len(tree_of(free, decoding(chain, written=35))) == 4, "five tokens are left, one is the model's own"
    assert len(tree_of(free, decoding(chain, written=39))) == 0
    assert len(tree_of(free, decoding(chain, written=0))) == 0, "the first token waits for no drafter"
    assert len(tree_of(narrow, decoding(chain, written=1))) == 4
    bush = Thrifty(DraftTree.of(range(16), [-1] * 16, np.linspace(0.9, 0.1, 16)))
    assert tree_of(narrow, decoding(bush, written=1)).tokens.tolist() == list(range(9))
    chains_only = DraftPolicy(100, lambda _: DraftLimits(max_nodes=9, branches=False), None)
    assert tree_of(chains_only, decoding(chain, written=1)).tokens.tolist() == list(range(9))
    assert tree_of(chains_only, decoding(bush, written=1)).tokens.tolist() == [0]


def test_with_many_sequences_a_drafter_is_asked_for_few_nodes_more_than_were_verified() -> None:
    """Proposing nodes that no step has time for would take longer than all else that the host does."""
    chain = Thrifty(DraftTree.of(range(64), scores=np.linspace(0.9, 0.1, 64)))
    policy = DraftPolicy(100, lambda _: NO_LIMITS, StepTimes(StepTimeCurve({1: 1.0, 64: 1.1})))
    running = [decoding(chain, written=1, max_draft_nodes=64, stop=StopParams(1000)) for _ in range(64)]
    for sequence in running:
        policy.start(sequence)

    def proposed(sequences: list[Sequence]) -> list[int]:
        drafts = policy.propose([ScheduledSequence(sequence, 1) for sequence in sequences], prompts_wait=False)
        return [len(drafts.trees[row]) for row in range(len(drafts.trees))]

    assert proposed(running[:8]) == [64] * 8
    assert proposed(running) == [8] * 64
    trees = [DraftTree.of(range(6)), *[EMPTY_TREE] * 63]
    rows = [BatchRow(np.zeros(4, np.int32), 10, np.ones(1, np.int32), tree, logits_from=0) for tree in trees]
    batch = lay_out(rows)
    policy.observe_step(batch, 1.0)
    written = {row: StepOutput(sequence, [1], [""], [False]) for row, sequence in enumerate(running)}
    policy.observe(written, batch.feedback(batch.tokens, None), 1.0, 64)
    assert proposed(running) == [24, *[8] * 63]


def test_chains_are_drafted_where_branches_cost_more_than_they_bring() -> None:
    bush = Thrifty(DraftTree.of(range(4), [-1, 0, -1, 2], np.array([0.6, 0.3, 0.5, 0.25], np.float32)))
    curve = StepTimeCurve({1: 1.0, 64: 2.0})
    for per_branch, nodes in ((0.0, [0, 1, 2, 3]), (0.01, [0, 1, 2, 3]), (1.0, [0, 1])):
        policy = DraftPolicy(100, lambda _: NO_LIMITS, StepTimes(curve, per_branch=per_branch))
        assert tree_of(policy, decoding(bush, written=1)).tokens.tolist() == nodes


def test_long_contexts_are_drafted_for_more_sparingly() -> None:
    """Each drafted token attends to the whole context, so it costs more the longer that is."""
    scores = np.linspace(0.9, 0.05, 16)
    bush = FakeStrategy(DraftTree.of(range(16), [-1] * 16, scores))
    curve = StepTimeCurve({1: 1.0, 64: 2.0})
    kept = []
    for context in (100, 1000, 10_000):
        times = StepTimes(curve, 0.0, ContextCost(per_sequence=1e-5, per_token=1e-4))
        policy = DraftPolicy(100, lambda _: NO_LIMITS, times)
        sequence = decoding(bush, written=1, context=context)
        policy.start(sequence)
        drafts = policy.propose([ScheduledSequence(sequence, 1)], prompts_wait=False)
        kept.append(int((scores >= policy.min_score(drafts)).sum()))
    assert kept[0] > kept[1] > kept[2]


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
    policy = DraftPolicy(100, lambda _: NO_LIMITS, StepTimes(StepTimeCurve({1: 1.0, 64: 64.0}), per_branch=per_branch))
    trees = [DraftTree.of(range(3), [-1, -1, 0]), EMPTY_TREE, DraftTree.of(range(2))]
    batch = lay_out([BatchRow(np.zeros(4, np.int32), 10, np.ones(1, np.int32), tree, logits_from=0) for tree in trees])
    policy.observe_step(batch, batch.size + per_branch)
    seconds = policy._verifying_seconds(batch.feedback(batch.tokens, None))
    assert seconds.tolist() == pytest.approx(expected, rel=0.01)


def test_steps_with_a_prompt_do_not_correct_the_step_times() -> None:
    """They compute logits for few of their tokens, so they are fast for their size."""
    times = StepTimes(StepTimeCurve({1: 1.0, 64: 64.0}))
    policy = DraftPolicy(100, lambda _: NO_LIMITS, times)
    for logits_from, expected in ((31, 32.0), (0, 16.0)):
        row = BatchRow(np.zeros(4, np.int32), 10, np.ones(32, np.int32), EMPTY_TREE, logits_from=logits_from)
        for _ in range(200):
            policy.observe_step(lay_out([row]), 16.0)
        assert times.at(32, 1) == pytest.approx(expected, rel=0.05)
