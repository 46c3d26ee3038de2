"""What our engine's steps contain: which sequences have a draft, and whether all of them run or half of them.

The `DraftEngine` makes the drafts. The rules here are those of prompts, grammars and the runner:

1. While prompts wait for further steps, nothing is drafted; sequences skip steps if their drafts pay (`_may_skip`).
2. A tree has at most the nodes that the request allows, is no deeper than what is left to write, and keeps to the
   limits of the runner.
3. Tokens that a grammar forces are a draft at no cost, laid over the strategy's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import NamedTuple

import numpy as np

from draftwood_model_runner.model_drafts import ModelDrafts
from draftwood_model_runner.models_beside import ModelsBeside
from draftwood_model_runner.output import StepOutput
from draftwood_model_runner.runners.base import DraftLimits, Following, StepBatch
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import DraftTree
from draftwood_strategies.arrays import Float32Array, Int32Array, segment_sizes
from draftwood_strategies.base import StepFeedback
from draftwood_strategies.draft import DraftTrees, merged
from draftwood_strategies.draft_engine.engine import Ask, DraftEngine, DraftSession, Verifies
from draftwood_strategies.draft_engine.guard import GuardedDrafter, IndexingBudget
from draftwood_strategies.draft_engine.step_times import MeasuredStepTimes, StepSize
from draftwood_strategies.draft_engine.watchdog import Watchdog
from draftwood_strategies.draft_engine.worth import best_chain, branches_in

_log = logging.getLogger(__name__)

_MAX_SKIPPED = 3
"""A sequence skips at most this many steps in a row while prompts wait."""
_WORTH_SKIPPING = 0.5
"""A sequence skips steps only if this many tokens of its drafts are accepted on average."""

_SMOOTHING = 0.1
"""Weight of the latest step in the mean of the host's time."""
_LEAST_GAIN = 0.05
"""Share of the time of a step that two microbatches must save."""


class Drafts(NamedTuple):
    """What takes part in a step, and what is drafted.

    Attributes:
        scheduled: of each sequence that takes part.
        trees: a draft for each.
        max_depths: int32[s], how deep each may be at most.
        min_score: the score below which draft nodes are not worth their time in this step.
    """

    scheduled: list[ScheduledSequence]
    trees: DraftTrees
    max_depths: Int32Array
    min_score: float = 0.0

    @classmethod
    def none(cls, scheduled: list[ScheduledSequence]) -> Drafts:
        """All of them without a draft."""
        return cls(scheduled, DraftTrees.empty(len(scheduled)), np.zeros(len(scheduled), np.int32))


class FollowingDrafts(NamedTuple):
    """What the device drafts for a step that follows one in flight.

    Attributes:
        asks: of the rows with a draft, in the order of the drafts.
        sizes: int32[s], tokens of each row at most: its last one and its draft.
        following: for the runner.
    """

    asks: list[Ask]
    sizes: Int32Array
    following: Following


class DraftedAhead(NamedTuple):
    """The drafts that devices made for a step which follows another.

    Attributes:
        room: how many nodes each session's draft had room for in the step.
        scores: float32[n], of all nodes, one draft after the other.
    """

    room: Mapping[DraftSession, int]
    scores: Float32Array


class _DraftConstraints(NamedTuple):
    """How the draft of a sequence is changed: the tokens that its grammar forces, and what the runner can verify."""

    forced: list[int]
    nodes: int
    branches: bool


class DraftPolicy:
    """Drafts for all sequences of an engine. One thread calls all methods.

    Args:
        vocab_size, step_times, watchdog: as for `DraftEngine`.
        draft_limits: as `Runner.draft_limits`.
        models: those of `ModelsBeside`.

    Attributes:
        drafts: the draft engine.
        models: that draft beside the target.
    """

    def __init__(
        self,
        vocab_size: int,
        draft_limits: Callable[[int], DraftLimits],
        step_times: MeasuredStepTimes | None,
        watchdog: Watchdog | None = None,
        models: SequenceOf[ModelDrafts] = (),
    ) -> None:
        self.models = ModelsBeside(models)
        self.drafts = DraftEngine(vocab_size, Verifies.TREES, step_times, watchdog)
        self._draft_limits = draft_limits
        self._step_times = step_times
        self._latest = StepSize(1, 1)

    @property
    def plain_step_seconds(self) -> float:
        """What a step of one token takes; 0 if unknown."""
        return 0.0 if self._step_times is None else self._step_times.at(1, sequences=1)

    def start(self, sequence: Sequence) -> None:
        """Prepares to draft for a sequence. Its strategy may be exchanged later, between two steps."""
        sequence.drafting = DraftSession(sequence.request, sequence.stats, row=sequence)
        self.models.start(sequence)
        self._begin(sequence, sequence.drafting)

    def _begin(self, sequence: Sequence, session: DraftSession) -> None:
        request = sequence.request
        alike = request.tenant, request.arm, request.drafting.strategy, request.drafting.options
        self.drafts.begin(session, sequence.strategy, alike, sequence.output)

    def _current(self, sequence: Sequence) -> DraftSession:
        """Its session, in which it drafts by the strategy that it has now."""
        session = _session(sequence)
        if sequence.strategy is not session.strategy:
            self._begin(sequence, session)
        return session

    def close(self, sequence: Sequence) -> None:
        """Ends drafting for a sequence, if it began."""
        if sequence.drafting is not None:
            self.drafts.end(self._current(sequence))
            sequence.drafting = None
            self.models.close(sequence)

    def give_up(self, sequences: SequenceOf[Sequence], error: Exception) -> None:
        """Drafting failed in a step of these sequences, which go on without drafts. It is not known for which of them
        it did."""
        _log.error("drafting failed in a step of %d sequences", len(sequences), exc_info=error)
        for sequence in sequences:
            if sequence.drafting is not None:
                _drafter(sequence).failed("drafting", error)

    def propose(self, plan: SequenceOf[ScheduledSequence], prompts_wait: bool) -> Drafts:
        """Which of the scheduled sequences take part in this step, with a draft for each.

        A prompt that needs further steps waits for each of them to end. So nothing is drafted then, and sequences skip
        a few steps if their drafts pay: one step with a draft makes up for them afterwards.

        Args:
            prompts_wait: as `SchedulerOutput.prompts_wait`.
        """
        sessions = [self._current(work.sequence) for work in plan]
        self.models.choose([work.sequence for work in plan])
        scheduled, asks, constrained = list[ScheduledSequence](), list[Ask](), dict[int, _DraftConstraints]()
        max_depths: Int32Array = np.zeros(len(plan), np.int32)
        indexing = IndexingBudget()
        for work, session in zip(plan, sessions, strict=True):
            sequence, request = work.sequence, work.sequence.request
            if prompts_wait and _may_skip(work):
                sequence.skipped += 1
                continue
            may_draft = work.reaches_end and (not prompts_wait or sequence.skipped == _MAX_SKIPPED)
            sequence.skipped = 0
            row = len(scheduled)
            scheduled.append(work)
            if not work.reaches_end and request.drafting.max_nodes and request.stop.max_tokens > 1:
                _drafter(sequence).index_ahead(indexing, work.tokens)
            left = request.stop.max_tokens - len(sequence.output)
            if not may_draft or left <= 1 or not _may_have_draft(sequence):
                continue
            # The first token waits for no drafter.
            ready = bool(sequence.output) and _drafter(sequence).ready(indexing)
            if not ready and sequence.grammar is None:
                continue
            nodes, limits = request.drafting.max_nodes, self._draft_limits(sequence.length - 1)
            max_depths[row] = min(left - 1, limits.max_depth)
            forced = forced_tokens(sequence)[:nodes]
            if forced or not limits.branches:
                constrained[row] = _DraftConstraints(forced, min(nodes, limits.max_nodes), limits.branches)
            if ready:
                asks.append(Ask(row, session, nodes if row in constrained else min(nodes, limits.max_nodes)))
        trees = self.drafts.propose(asks, len(scheduled), len(plan))
        trees, max_depths = _constrained(trees, constrained), max_depths[: len(scheduled)]
        if not trees.scores.shape[0]:
            return Drafts(scheduled, trees, max_depths)
        tokens = sum(work.tokens for work in scheduled)
        context = sum(work.tokens * work.sequence.committed for work in scheduled) // tokens
        worthwhile = self.drafts.worthwhile(trees, tokens, context)
        return Drafts(scheduled, worthwhile.trees, max_depths, worthwhile.min_score)

    def follows(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the next step of these, which decode, can be drafted for while their latest one is in flight."""
        for sequence in sequences:
            session = sequence.drafting
            if session is None or session.drafter is None or sequence.strategy is not session.strategy:
                return False
            if _may_have_draft(sequence) and not session.drafter.follows:
                return False
        return True

    def follow(self, sequences: SequenceOf[Sequence], sources: SequenceOf[int]) -> FollowingDrafts:
        """What the device drafts for sequences that all decode and `follow` a step in flight.

        Args:
            sources: the row of each in the step in flight.
        """
        asks, indexing = list[Ask](), IndexingBudget()
        for row, sequence in enumerate(sequences):
            left = sequence.longest - sequence.length - 1  # the step in flight writes one token or more
            if left > 1 and _may_have_draft(sequence) and _drafter(sequence).ready(indexing):
                nodes = sequence.request.drafting.max_nodes
                asks.append(Ask(row, _session(sequence), min(nodes, self._draft_limits(sequence.length - 1).max_nodes)))
        drafters = [(ask, on) for ask in asks if (on := _drafter(sequences[ask.row]).on_device) is not None]
        asks = [ask for ask, _ in drafters]
        rows, draft = [ask.row for ask in asks], None
        drafted: Int32Array = np.full(len(sequences), -1, np.int32)
        sizes: Int32Array = np.ones(len(sequences), np.int32)
        drafted[rows] = np.arange(len(rows))
        if drafters:
            budgets = self.drafts.budgets_ahead(asks, len(sequences))
            sizes[rows] += budgets
            numbers = np.array([drafter.row for _, drafter in drafters], np.int32)
            of_step = np.array([sources[row] for row in rows], np.int32)
            draft = partial(drafters[0][1].device.follow, numbers, of_step, budgets)
        return FollowingDrafts(asks, sizes, Following(np.array(sources, np.int32), drafted, draft))

    def top_k(self, drafts: Drafts) -> int:
        """How many of the most probable tokens at each node the drafters of the step need, at most."""
        return max(_drafter(work.sequence).top_k for work in drafts.scheduled)

    def observe_step(self, batch: StepBatch, seconds: float) -> None:
        """The model took so many seconds for a batch.

        A step with a prompt says nothing of others: it computes logits for few of its tokens.
        """
        self._latest = StepSize(batch.size, batch.rows, batch.mean_context)
        if batch.logit_rows.size == batch.size:
            self.models.observe_step(batch.rows, seconds)
        if self._step_times is None or batch.logit_rows.size != batch.size:
            self.drafts.observe_step(self._latest, None)
            return
        drafts = int(np.count_nonzero(segment_sizes(batch.cu_seqlens) > 1))
        branches = branches_in(batch.parents, batch.cu_seqlens) if self._step_times.per_branch else 0
        self.drafts.observe_step(self._latest._replace(drafts=drafts, branches=branches), seconds)

    def observe(
        self,
        written: Mapping[int, StepOutput],
        feedback: StepFeedback,
        model_seconds: float,
        learned: Collection[DraftSession] = (),
        ahead: DraftedAhead | None = None,
    ) -> None:
        """The latest step, in which sequences wrote tokens.

        Args:
            written: what, by their batch rows.
            feedback: of all batch rows.
            model_seconds: what the forward pass took.
            learned: whose devices learned it already.
            ahead: what was drafted by devices.
        """
        nodes, each = (segment_sizes(feedback.offsets) - 1).tolist(), [*written.items()]
        sessions = [_session(output.sequence) for _, output in each]
        for (row, _), session in zip(each, sessions, strict=True):
            session.drafted = session.worth = nodes[row]
        if ahead is not None:
            self._observe_ahead(ahead, sessions, [row for row, _ in each], feedback)
        active = [i for i, session in enumerate(sessions) if session.drafter is not None and session.drafter.active]
        if not active:
            return
        if len(active) < len(nodes):
            feedback = feedback.part([each[i][0] for i in active])
        sessions, outputs = [sessions[i] for i in active], [each[i][1] for i in active]
        accepted = np.array([*map(sum, [output.drafted for output in outputs])], np.int32)
        written_tokens = [output.token_ids for output in outputs]
        tokens = np.array([token for token_ids in written_tokens for token in token_ids], np.int32)
        offsets = np.cumsum([0, *map(len, written_tokens)], dtype=np.int32)
        self.drafts.observe(sessions, accepted, self._latest, model_seconds, feedback)
        self.drafts.learn(sessions, tokens, offsets, feedback, learned)

    def _observe_ahead(
        self, ahead: DraftedAhead, sessions: SequenceOf[DraftSession], rows: list[int], feedback: StepFeedback
    ) -> None:
        """Which nodes of the drafts would have been verified if the host had seen them before: the next ones have room
        for about as many."""
        is_node = feedback.parents >= 0
        offsets: Int32Array = (feedback.offsets - np.arange(feedback.offsets.shape[0])).astype(np.int32)
        trees = DraftTrees(feedback.tokens[is_node], feedback.parents[is_node] - np.int32(1), ahead.scores, offsets)
        least = self.drafts.worthwhile(trees, len(trees), self._latest.context).min_score
        worth = np.append(0, np.cumsum(ahead.scores >= least))[offsets]
        for session, row in zip(sessions, rows, strict=True):
            if (room := ahead.room.get(session)) is None:
                continue
            session.proposed = int(offsets[row + 1] - offsets[row])
            session.stats.proposed_tokens += session.proposed
            session.drafted, session.worth = room, int(worth[row + 1] - worth[row])


def _session(sequence: Sequence) -> DraftSession:
    """The session of a sequence that was started."""
    assert sequence.drafting is not None
    return sequence.drafting


def _drafter(sequence: Sequence) -> GuardedDrafter:
    """The drafter of a sequence that was started."""
    session = sequence.drafting
    assert session is not None
    assert session.drafter is not None
    return session.drafter


def _may_have_draft(sequence: Sequence) -> bool:
    """Whether a draft can be of use in a step in which it writes. With a grammar whose masks are slow, a step writes
    one token only."""
    if sequence.request.drafting.max_nodes == 0:
        return False
    return _drafter(sequence).active if sequence.grammar is None else not sequence.grammar.slow


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


def _may_skip(work: ScheduledSequence) -> bool:
    """Whether a sequence may skip a step, and makes up for it when it drafts again."""
    sequence = work.sequence
    writes = work.tokens == 1 and work.reaches_end and len(sequence.output) > 0
    return writes and sequence.skipped < _MAX_SKIPPED and _drafter(sequence).expected >= _WORTH_SKIPPING


def forced_tokens(sequence: Sequence) -> list[int]:
    """The tokens that the grammar of a sequence forces next; none if it fails, as they would only be a draft."""
    if sequence.grammar is None:
        return []
    try:
        return sequence.grammar.forced()
    except Exception:
        _log.exception("the grammar of request %r failed to compute forced tokens", sequence.request.request_id)
        return []


class MicrobatchPolicy:
    """Decides before each step whether to compute the running sequences as two microbatches in turn: the host works on
    one while the device computes the other.

    A step waits for what the host does before and after it: scheduling, drafting, verification, learning. Two steps of
    half of the sequences hide that time, but read the weights twice. If a step takes as long as its arithmetic, with
    many sequences or many draft tokens, that costs little; if it takes as long as reading the weights, it costs nearly
    twice as much. So the step-time model decides. Asynchronous scheduling (vLLM) and the overlap scheduler (SGLang)
    begin the next step of all sequences beforehand and need no microbatches, but cannot draft from what the step before
    has written.

    Args:
        step_times: the step-time model; None for no microbatches.
    """

    def __init__(self, step_times: MeasuredStepTimes | None) -> None:
        self._step_times = step_times
        self._host_seconds = 0.0
        self._latest: StepBatch | None = None

    def observe(self, batch: StepBatch, host_seconds: float) -> None:
        """A step in which no prompt was read, and the seconds that the host worked before and after it."""
        if self._step_times is None:
            return
        per_row = host_seconds / batch.rows
        self._host_seconds += (_SMOOTHING if self._latest else 1.0) * (per_row - self._host_seconds)
        self._latest = batch

    def microbatch(self, running: int) -> int | None:
        """Decoding sequences of the next step at most: half of the running ones if that pays; None for all."""
        return -(-running // 2) if running >= 2 and self._pays(running) else None

    def _pays(self, running: int) -> bool:
        if self._step_times is None or self._latest is None:
            return False
        tokens = self._latest.size * running // self._latest.rows
        host, context = self._host_seconds * running, self._latest.mean_context
        whole = self._step_times.at(tokens, running, context) + host
        halves = 2 * self._step_times.at(-(-tokens // 2), -(-running // 2), context)
        return max(halves, host) <= (1.0 - _LEAST_GAIN) * whole
