"""What our engine asks drafts for: limits of request and runner, and of batches; and when two halves in turn pay."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_model_runner.draft_policy import DraftPolicy, MicrobatchPolicy
from draftwood_model_runner.output import StepOutput
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.base import NO_LIMITS, DraftLimits, StepBatch
from draftwood_model_runner.runners.batch import BatchRow, BatchRows, lay_out, lay_out_trees
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import DraftTree
from draftwood_strategies.draft import EMPTY_TREE
from draftwood_strategies.draft_engine.step_times import ContextCost, MeasuredStepTimes, StepTimeCurve
from tests.model_runner.sequences import make_sequence
from tests.strategies.fakes import FakeStrategy


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
    chains = BatchRows([pages], np.array([3], np.int32), np.array([1], np.int32), np.array([0, 1], np.int32), zero)
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
    policy = DraftPolicy(100, lambda _: NO_LIMITS, MeasuredStepTimes(StepTimeCurve({1: 1.0, 64: 1.1})))
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
    policy.observe(written, batch.feedback(batch.tokens, None), 1.0)
    assert proposed(running) == [24, *[8] * 63]


def test_chains_are_drafted_where_branches_cost_more_than_they_bring() -> None:
    bush = Thrifty(DraftTree.of(range(4), [-1, 0, -1, 2], np.array([0.6, 0.3, 0.5, 0.25], np.float32)))
    curve = StepTimeCurve({1: 1.0, 64: 2.0})
    for per_branch, nodes in ((0.0, [0, 1, 2, 3]), (0.01, [0, 1, 2, 3]), (1.0, [0, 1])):
        policy = DraftPolicy(100, lambda _: NO_LIMITS, MeasuredStepTimes(curve, per_branch=per_branch))
        assert tree_of(policy, decoding(bush, written=1)).tokens.tolist() == nodes


def test_long_contexts_are_drafted_for_more_sparingly() -> None:
    """Each drafted token attends to the whole context, so it costs more the longer that is."""
    scores = np.linspace(0.9, 0.05, 16)
    bush = FakeStrategy(DraftTree.of(range(16), [-1] * 16, scores))
    curve = StepTimeCurve({1: 1.0, 64: 2.0})
    kept = []
    for context in (100, 1000, 10_000):
        times = MeasuredStepTimes(curve, 0.0, ContextCost(per_sequence=1e-5, per_token=1e-4))
        policy = DraftPolicy(100, lambda _: NO_LIMITS, times)
        sequence = decoding(bush, written=1, context=context)
        policy.start(sequence)
        drafts = policy.propose([ScheduledSequence(sequence, 1)], prompts_wait=False)
        kept.append(int((scores >= drafts.min_score).sum()))
    assert kept[0] > kept[1] > kept[2]


def test_steps_with_a_prompt_do_not_correct_the_step_times() -> None:
    """They compute logits for few of their tokens, so they are fast for their size."""
    times = MeasuredStepTimes(StepTimeCurve({1: 1.0, 64: 64.0}))
    policy = DraftPolicy(100, lambda _: NO_LIMITS, times)
    for logits_from, expected in ((31, 32.0), (0, 16.0)):
        row = BatchRow(np.zeros(4, np.int32), 10, np.ones(32, np.int32), EMPTY_TREE, logits_from=logits_from)
        for _ in range(200):
            policy.observe_step(lay_out([row]), 16.0)
        assert times.at(32, 1) == pytest.approx(expected, rel=0.05)


READING, PER_TOKEN = 4e-3, 30e-6
"""Seconds to read the weights, and to compute a token: from 133 tokens on, a step takes as long as its arithmetic."""


def step_of(rows: int, tokens: int) -> StepBatch:
    chain = np.zeros(tokens, np.int32)
    return lay_out([BatchRow(np.zeros(4, np.int32), 0, chain, EMPTY_TREE, tokens - 1) for _ in range(rows)])


@pytest.fixture
def policy() -> MicrobatchPolicy:
    sizes = [1, 8, 32, 64, 128, 133, 256, 512, 1024, 4096]
    return MicrobatchPolicy(MeasuredStepTimes(StepTimeCurve({n: max(READING, PER_TOKEN * n) for n in sizes})))


@pytest.mark.parametrize(
    ("rows", "tokens", "host_seconds", "most"),
    [
        pytest.param(64, 1, 1e-3, None, id="weights would be read twice"),
        pytest.param(64, 1, 10e-3, 32, id="the host takes longer than that"),
        pytest.param(64, 6, 5e-3, 32, id="arithmetic takes longest"),
        pytest.param(32, 6, 2.5e-3, 32, id="halves tell the same as whole steps"),
        pytest.param(64, 6, 0.1e-3, None, id="the host takes next to nothing"),
    ],
)
def test_two_halves_of_64(
    policy: MicrobatchPolicy, rows: int, tokens: int, host_seconds: float, most: int | None
) -> None:
    policy.observe(step_of(rows, tokens), host_seconds)
    assert policy.microbatch(64) == most
    assert policy.microbatch(63) == most
    assert policy.microbatch(1) is None


def test_the_mean_follows(policy: MicrobatchPolicy) -> None:
    policy.observe(step_of(64, 6), host_seconds=5e-3)
    for _ in range(100):
        policy.observe(step_of(64, 6), host_seconds=0.1e-3)
    assert policy.microbatch(64) is None


def test_nothing_is_divided_without_step_times() -> None:
    policy = MicrobatchPolicy(None)
    policy.observe(step_of(64, 6), host_seconds=1.0)
    assert policy.microbatch(64) is None
