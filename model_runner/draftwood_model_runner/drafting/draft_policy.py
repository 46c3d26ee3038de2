"""How much to draft, decided in one place, for each step and sequence. No torch.

A draft passes these decisions, in this order:
1. While prompts wait for further steps, nothing is drafted; sequences skip steps if their drafts pay (`_may_skip`).
2. A drafter pauses if its drafts do not pay, and is switched off if it is too slow (`draft_account`).
3. A tree has at most the nodes that the request allows, is no deeper than what is left to write, and keeps to the
   limits of the runner. With many sequences a drafter is asked for few nodes more than it lately had verified.
4. Of all trees of a step, the nodes are verified that are worth their time by the step-time model (`budget`); where
   branches cost more than they gain, those of chains (`chains`).
Which sources of a hybrid are asked is decided by the hybrid itself: that changes what a draft costs, not how much of
it is verified.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from draftwood_model_runner.output import StepOutput
from draftwood_model_runner.runners.base import DraftLimits, StepBatch
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import DraftTree, Strategy
from draftwood_strategies.base import StepFeedback, UsesModelTable
from draftwood_strategies.budgeting.budget import min_worthwhile_score, with_change, with_drafts
from draftwood_strategies.budgeting.chains import (
    best_chain,
    branches_by_row,
    branches_in,
    with_branches,
    worthwhile_branches,
)
from draftwood_strategies.budgeting.draft_account import DraftCostModel, step_all
from draftwood_strategies.budgeting.guarded_batches import observe_all, propose_all
from draftwood_strategies.budgeting.guarded_drafter import GuardedDrafter, IndexingBudget
from draftwood_strategies.budgeting.step_time import StepSeconds, StepTimes
from draftwood_strategies.budgeting.watchdog import Watchdog
from draftwood_strategies.draft import DraftTrees, Int32Array, merged
from draftwood_strategies.native import Float64Array, segment_sizes

_log = logging.getLogger(__name__)

_MOST_SKIPPED = 3
"""A sequence skips at most this many steps in a row while prompts wait."""
_WORTH_SKIPPING = 0.5
"""A sequence skips steps only if this many tokens of its drafts are accepted on average."""
_PROPOSED, _LEAST_PROPOSED = 512, 8
"""Nodes that the drafters of a step may always propose together, and each of them: with 8 sequences 64 for each."""
_MORE_THAN_VERIFIED = 4
"""A drafter may propose so many times the nodes that it had verified last."""
_COST_MODELS = 4096
"""The cost model is remembered for so many arms and strategies of tenants; the least recently used one is dropped."""


class Drafts(NamedTuple):
    """What takes part in a step, and what is drafted.

    Attributes:
        scheduled: of each sequence that takes part.
        trees: a draft for each.
        max_depths: int32[s], how deep each may be at most.
    """

    scheduled: list[ScheduledSequence]
    trees: DraftTrees
    max_depths: Int32Array

    @classmethod
    def none(cls, scheduled: list[ScheduledSequence]) -> Drafts:
        """All of them without a draft."""
        return cls(scheduled, DraftTrees.empty(len(scheduled)), np.zeros(len(scheduled), np.int32))


class _DraftConstraints(NamedTuple):
    """How the draft of a sequence is changed: the tokens that its grammar forces, and what the runner can verify."""

    forced: list[int]
    nodes: int
    branches: bool


@dataclass(eq=False, slots=True)
class _State:
    """Drafting of one sequence, from its first step to its end."""

    strategy: Strategy | None
    drafter: GuardedDrafter
    skipped: int = 0
    """Steps that it skipped since it last wrote."""
    verified: int = 0
    """Nodes of its latest draft that were worth a place in a step."""


class DraftPolicy:
    """Drafts for all sequences of an engine. One thread calls all methods.

    Args:
        vocab_size: draft tokens are below it.
        draft_limits: as `Runner.draft_limits`.
        step_times: the step-time model; None verifies all that strategies propose.
        watchdog: interrupts strategies that do not return; None for no limit.

    Attributes:
        failures: for each strategy, by name, how many sequences it was switched off for.
        model_table: a successor table for strategies that take one (`UsesModelTable`); None for none.
    """

    def __init__(
        self,
        vocab_size: int,
        draft_limits: Callable[[int], DraftLimits],
        step_times: StepTimes | None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.model_table: Int32Array | None = None
        self._vocab_size = vocab_size
        self._draft_limits = draft_limits
        self._step_times = step_times
        self._watchdog = watchdog
        self._cost_model = lru_cache(_COST_MODELS)(lambda *drafts: DraftCostModel())
        self._states: dict[Sequence, _State] = {}
        self._latest: StepBatch | None = None
        self._context = 0

    @property
    def sequences(self) -> frozenset[Sequence]:
        """Those that were started and not closed."""
        return frozenset(self._states)

    @property
    def plain_step_seconds(self) -> float:
        """What a step of one token takes; 0 if unknown."""
        return 0.0 if self._step_times is None else self._step_times.at(1, sequences=1)

    def start(self, sequence: Sequence) -> None:
        """Prepares to draft for a sequence. Its strategy may be exchanged later, between two steps."""
        self._states[sequence] = _State(sequence.strategy, self._drafter(sequence))

    def _drafter(self, sequence: Sequence) -> GuardedDrafter:
        request = sequence.request
        if self.model_table is not None:
            try:
                if isinstance(sequence.strategy, UsesModelTable):
                    sequence.strategy.set_model_table(self.model_table)
            except Exception:
                _log.exception("strategy %r does not take the model's successors", request.strategy_name)
        cost_model = self._cost_model(request.tenant, request.arm, request.strategy_name, request.strategy_options)
        return GuardedDrafter(sequence, self._vocab_size, self.failures, cost_model, self._watchdog)

    def _with_current_strategy(self, sequence: Sequence, state: _State) -> _State:
        """The state; if the sequence has another strategy now, with a drafter of that one."""
        if sequence.strategy is not state.strategy:
            state.drafter.close()
            state.strategy, state.drafter = sequence.strategy, self._drafter(sequence)
            state.drafter.defer(sequence.output)
        return state

    def close(self, sequence: Sequence) -> None:
        """Closes the drafter of a sequence, if there is one."""
        state = self._states.pop(sequence, None)
        if state is not None:
            self._with_current_strategy(sequence, state).drafter.close()

    def give_up(self, sequences: SequenceOf[Sequence], error: Exception) -> None:
        """Drafting failed in a step of these sequences, which go on without drafts. It is not known for which of them
        it did."""
        _log.error("drafting failed in a step of %d sequences", len(sequences), exc_info=error)
        for sequence in sequences:
            if sequence in self._states:
                self._states[sequence].drafter.failed("drafting", error)

    def propose(self, plan: SequenceOf[ScheduledSequence], prompts_wait: bool) -> Drafts:
        """Which of the scheduled sequences take part in this step, with a draft for each.

        A prompt that needs further steps waits for each of them to end. So nothing is drafted then, and sequences skip
        a few steps if their drafts pay: one step with a draft makes up for them afterwards.

        Args:
            prompts_wait: as `SchedulerOutput.prompts_wait`.
        """
        work, asked, drafters, budgets, constrained = (
            list[ScheduledSequence](),
            [],
            [],
            [],
            dict[int, _DraftConstraints](),
        )
        max_depths: Int32Array = np.zeros(len(plan), np.int32)
        indexing = IndexingBudget()
        for one in plan:
            sequence = one.sequence
            state = self._with_current_strategy(sequence, self._states[sequence])
            if prompts_wait and _may_skip(one, state):
                state.skipped += 1
                continue
            may_draft = one.reaches_end and (not prompts_wait or state.skipped == _MOST_SKIPPED)
            state.skipped = 0
            work.append(one)
            if not one.reaches_end and sequence.request.max_draft_nodes and sequence.request.stop.max_tokens > 1:
                state.drafter.index_ahead(indexing, one.tokens)
            if not may_draft or (sequence.grammar is None and not state.drafter.active):
                continue
            left, nodes = sequence.request.stop.max_tokens - len(sequence.output), sequence.request.max_draft_nodes
            if left <= 1 or nodes == 0 or (sequence.grammar is not None and sequence.grammar.slow):
                continue  # with a grammar whose masks are slow, a step writes one token only
            ready = bool(sequence.output) and state.drafter.ready(indexing)  # the first token waits for no drafter
            if not ready and sequence.grammar is None:
                continue
            limits, row = self._draft_limits(sequence.length - 1), len(work) - 1
            max_depths[row] = min(left - 1, limits.max_depth)
            forced = forced_tokens(sequence)[:nodes]
            if forced or not limits.branches:
                constrained[row] = _DraftConstraints(forced, min(nodes, limits.max_nodes), limits.branches)
            if ready:
                asked.append(row)
                drafters.append(state.drafter)
                most = nodes if row in constrained else min(nodes, limits.max_nodes)
                budgets.append(self._worth_proposing(most, state, len(plan)))
        trees = DraftTrees.empty(len(work))
        if asked:
            found = propose_all(drafters, np.array(budgets, np.int32))
            trees = DraftTrees.scattered([(asked, found)], len(work))
        drafts = Drafts(work, _constrained(trees, constrained), max_depths[: len(work)])
        if self._step_times is None or not self._step_times.per_branch or not drafts.trees.scores.shape[0]:
            return drafts
        tokens, step_seconds = self._seconds_of(self._step_times, drafts)
        worthwhile = worthwhile_branches(drafts.trees, tokens, step_seconds, self._step_times.per_branch)
        return drafts._replace(trees=worthwhile)

    def _worth_proposing(self, most: int, state: _State, sequences: int) -> int:
        """How many nodes, at most `most`, a drafter is asked for in a step of so many sequences: with many, few nodes
        of each are worth verifying, and proposing the others takes longer than all else that the host does."""
        if self._step_times is None:
            return most
        return min(most, max(_LEAST_PROPOSED, _PROPOSED // sequences, _MORE_THAN_VERIFIED * state.verified))

    def min_score(self, drafts: Drafts) -> float:
        """The score below which draft nodes are not worth their time in this step."""
        if self._step_times is None or not drafts.trees.scores.shape[0]:
            return 0.0
        tokens, step_seconds = self._seconds_of(self._step_times, drafts)
        step_seconds = with_branches(step_seconds, drafts.trees, self._step_times.per_branch)
        return min_worthwhile_score(drafts.trees.scores, tokens, step_seconds)

    def _seconds_of(self, times: StepTimes, drafts: Drafts) -> tuple[int, StepSeconds]:
        """The tokens of a step without its drafts, and the seconds for more."""
        tokens = sum(work.tokens for work in drafts.scheduled)
        context = sum(work.tokens * work.sequence.committed for work in drafts.scheduled) // tokens
        step_times = partial(times.between, sequences=len(drafts.scheduled), context=context)
        step_seconds = with_drafts(step_times, drafts.trees, times.per_draft)
        if self._latest is not None:
            step_seconds = with_change(step_seconds, self._latest.size, times.per_change)
        return tokens, step_seconds

    def top_k(self, drafts: Drafts) -> int:
        """How many of the most probable tokens at each node the drafters of the step need, at most."""
        return max(self._states[work.sequence].drafter.top_k for work in drafts.scheduled)

    def observe_step(self, batch: StepBatch, seconds: float) -> None:
        """The model took so many seconds for a batch.

        A step with a prompt says nothing of others: it computes logits for few of its tokens.
        """
        changed = self._latest is None or self._latest.size != batch.size
        self._latest, self._context = batch, batch.mean_context
        if self._step_times is not None and batch.logit_rows.size == batch.size:
            drafts = int(np.count_nonzero(segment_sizes(batch.cu_seqlens) > 1))
            branches = branches_in(batch.parents, batch.cu_seqlens) if self._step_times.per_branch else 0
            self._step_times.observe(
                batch.size, batch.rows, seconds, self._context, drafts=drafts, changed=changed, branches=branches
            )

    def observe(
        self, written: Mapping[int, StepOutput], feedback: StepFeedback, model_seconds: float, sharing: int
    ) -> None:
        """A step in which sequences wrote tokens.

        Args:
            written: what, by their batch rows.
            feedback: of all batch rows.
            model_seconds: what the forward pass took.
            sharing: how many sequences shared it.
        """
        states, sizes = [self._states[output.sequence] for output in written.values()], segment_sizes(feedback.offsets)
        for row, state in zip(written, states, strict=True):
            state.verified = int(sizes[row]) - 1
        drafters = [state.drafter for state in states]
        active = [i for i, drafter in enumerate(drafters) if drafter.active]
        if not active:
            return
        each, drafters = [*written.items()], [drafters[i] for i in active]
        if len(active) < feedback.offsets.shape[0] - 1:
            feedback = feedback.part([each[i][0] for i in active])
        accepted = np.array([*map(sum, [each[i][1].drafted for i in active])], np.int32)
        verifying = self._verifying_seconds(feedback)
        step_all([drafter.account for drafter in drafters], model_seconds, accepted, verifying, sharing)
        tokens = [each[i][1].token_ids for i in active]
        offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int32)
        observe_all(drafters, np.array([token for one in tokens for token in one], np.int32), offsets, feedback)

    def _verifying_seconds(self, feedback: StepFeedback) -> Float64Array:
        """What the nodes and branches of each sequence's draft added to the latest step, by the step-time model,
        float64[s]."""
        times, batch, nodes = self._step_times, self._latest, segment_sizes(feedback.offsets) - 1
        most = int(nodes.max())
        if times is None or batch is None or most == 0:
            return np.zeros(nodes.shape[0])
        seconds = times.between(batch.size - most, batch.size, batch.rows, self._context)
        added = seconds[most] - seconds[most - nodes]
        if batch.rows > 1:
            added += times.per_draft * (nodes > 0)
        if times.per_branch:
            added += times.per_branch * branches_by_row(feedback.parents, feedback.offsets)
        return np.asarray(added)


def _constrained(trees: DraftTrees, rows: dict[int, _DraftConstraints]) -> DraftTrees:
    """With the drafts of some rows changed: tokens that a grammar forces, which are a draft at no cost, laid over them,
    and cut to what the runner can verify."""
    if not rows:
        return trees
    each = [trees[row] for row in range(len(trees))]
    for row, (forced, nodes, branches) in rows.items():
        tree = merged([DraftTree.of(forced), each[row]]) if forced else each[row]
        each[row] = (tree if branches else best_chain(tree)).pruned(nodes)
    return DraftTrees.of(each)


def _may_skip(work: ScheduledSequence, state: _State) -> bool:
    """Whether a sequence may skip a step, and makes up for it when it drafts again."""
    writes = work.tokens == 1 and work.reaches_end and len(work.sequence.output) > 0
    return writes and state.skipped < _MOST_SKIPPED and state.drafter.expected >= _WORTH_SKIPPING


def forced_tokens(sequence: Sequence) -> list[int]:
    """The tokens that the grammar of a sequence forces next; none if it fails, as they would only be a draft."""
    if sequence.grammar is None:
        return []
    try:
        return sequence.grammar.forced()
    except Exception:
        _log.exception("the grammar of request %r failed to compute forced tokens", sequence.request.request_id)
        return []
