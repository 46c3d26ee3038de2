"""The draft engine: rows of a step in, draft trees out, for any host.

A host has rows, one for each sequence of its steps. It begins a session for a row, asks for the drafts of a step, tells
what the step accepted and took, and ends the session. How much is drafted is decided here and in `controller`, whether
a node is worth its time in `worth`, and `guard` keeps the faults of strategies from rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from draftwood_strategies import dispatch
from draftwood_strategies.arrays import Float64Array, Int32Array, segment_indices, segment_sizes
from draftwood_strategies.base import DraftStats, StepFeedback, Strategy, UsesModelTable
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.draft_engine.controller import (
    DraftCostModel,
    pause_all,
    step_all,
    worth_drafting_ahead,
    worth_proposing,
)
from draftwood_strategies.draft_engine.guard import DraftedRequest, GuardedDrafter, TimedCalls, draft_by_model
from draftwood_strategies.draft_engine.step_times import MEASURED_CONTEXT, StepSeconds, StepSize, StepTimes
from draftwood_strategies.draft_engine.watchdog import Watchdog
from draftwood_strategies.draft_engine.worth import (
    branches_by_row,
    min_worthwhile_score,
    with_branches,
    with_change,
    with_drafts,
    worthwhile_branches,
    worthwhile_chains,
)

_log = logging.getLogger(__name__)

_COST_MODELS = 4096
"""The cost model is remembered for so many arms and strategies of tenants; the least recently used one is dropped."""


class Verifies(Enum):
    """What a host verifies of the draft of a row."""

    TREES = "trees, of as many nodes as are worth their time"
    CHAINS = "one continuation, as long as is worth its time"
    FIXED_TREES = "trees, of as many nodes as the host verifies for a row without a draft"


class NoDraft(Enum):
    """Why nothing was drafted for a row in the latest step."""

    NOT_ASKED = "off: the request has no drafts"
    FAILED = "off: the strategy failed"
    INDEXING = "off: the prompt is being indexed"
    DOES_NOT_PAY = "off: does not pay"
    MEMORY_EMPTY = "off: memory empty"
    BATCH_FULL = "off: batch full"


@dataclass(eq=False, slots=True)
class DraftSession:
    """Drafting for one row, from its first step to its end.

    Attributes:
        strategy: that `drafter` is of; None for no drafts.
        drafter: None before it begins.
        proposed: nodes of the latest draft.
        drafted: those of them that its host verified; with padding, where it verifies some.
        worth: how many of its nodes were worth their time.
        row: of the host, for drafters that ask (`DraftsForRow`).
    """

    request: DraftedRequest
    stats: DraftStats
    strategy: Strategy | None = None
    drafter: GuardedDrafter | None = None
    proposed: int = 0
    drafted: int = 0
    worth: int = 0
    row: object = None

    @property
    def no_draft(self) -> NoDraft | None:
        """Why its latest step had no draft; None if it had one."""
        if self.drafted:
            return None
        if self.stats.drafting_disabled_reason:
            return NoDraft.FAILED
        if self.drafter is None or not self.drafter.active or self.request.drafting.max_nodes == 0:
            return NoDraft.NOT_ASKED
        if self.drafter.indexing:
            return NoDraft.INDEXING
        if self.drafter.pauses:
            return NoDraft.DOES_NOT_PAY
        return NoDraft.BATCH_FULL if self.proposed else NoDraft.MEMORY_EMPTY


class Ask(NamedTuple):
    """A row of the next step that is to have a draft, of at most `nodes` nodes, 1 or more. Its drafter is `ready`."""

    row: int
    session: DraftSession
    nodes: int


class WorthwhileTrees(NamedTuple):
    """Draft trees, of which the nodes with at least this score are worth their time."""

    trees: DraftTrees
    min_score: float


class DraftEngine:
    """Drafts for the rows of one host. One thread at a time calls its methods.

    Args:
        vocab_size: draft tokens are below it.
        step_times: what its steps cost; None verifies all that strategies propose.
        watchdog: interrupts strategies that do not return; None for no limit.

    Attributes:
        failures: for each strategy, by name, how many rows it was switched off for.
        model_table: a successor table for strategies that take one (`UsesModelTable`); None for none.
    """

    def __init__(
        self, vocab_size: int, verifies: Verifies, step_times: StepTimes | None, watchdog: Watchdog | None = None
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.model_table: Int32Array | None = None
        self._vocab_size = vocab_size
        self._verifies = verifies
        self._times = step_times
        self._watchdog = watchdog
        self._cost_model = lru_cache(_COST_MODELS)(lambda key: DraftCostModel())
        self._latest_tokens: int | None = None

    def begin(self, session: DraftSession, strategy: Strategy | None, alike: Hashable, written: list[int]) -> None:
        """Drafts for a session by this strategy from now on, in place of the one before.

        Args:
            alike: drafts with the same are expected to cost and gain the same; None for those of no other session.
            written: what its row wrote already.
        """
        if session.drafter is not None:
            session.drafter.close()
        if self.model_table is not None:
            try:
                if isinstance(strategy, UsesModelTable):
                    strategy.set_model_table(self.model_table)
            except Exception:
                _log.exception("strategy %r does not take the model's successors", session.request.drafting.strategy)
        cost_model = DraftCostModel() if alike is None else self._cost_model(alike)
        session.strategy = strategy
        session.drafter = GuardedDrafter(
            session.request,
            strategy,
            session.stats,
            self._vocab_size,
            self.failures,
            cost_model,
            self._watchdog,
            session.row,
        )
        session.drafter.defer(written)

    def end(self, session: DraftSession) -> None:
        """Closes the drafter of a session, and notes in its statistics why its last step had no draft."""
        reason = session.no_draft
        if reason is not None and reason is not NoDraft.NOT_ASKED:
            session.stats.no_draft = reason.value
        if session.drafter is not None:
            session.drafter.close()

    def probes(self, rows: int) -> bool:
        """Whether the next step, of so many rows, is to have no drafts, to show what that takes. Asked once a step."""
        return self._times is not None and self._times.probes(rows)

    def propose(self, asks: SequenceOf[Ask], rows: int, sharing: int) -> DraftTrees:
        """A checked draft tree for each of `rows` rows; empty for a row that is not asked for, or whose drafter failed.

        Args:
            sharing: rows that drafters share the host's time with.
        """
        if not asks:
            return DraftTrees.empty(rows)
        drafters = [ask.session.drafter for ask in asks if ask.session.drafter is not None]
        trees = propose_all(drafters, self.budgets(asks, sharing))
        for ask, nodes in zip(asks, segment_sizes(trees.offsets).tolist(), strict=True):
            ask.session.proposed = nodes
        return DraftTrees.scattered([([ask.row for ask in asks], trees)], rows)

    def budgets(self, asks: SequenceOf[Ask], sharing: int) -> Int32Array:
        """int32[asks], the most nodes of each draft; `sharing` as for `propose`."""
        if self._times is None or self._verifies is Verifies.FIXED_TREES:
            return np.array([ask.nodes for ask in asks], np.int32)
        nodes = [worth_proposing(ask.nodes, ask.session.drafted, sharing) for ask in asks]
        return np.array(nodes, np.int32)

    def budgets_ahead(self, asks: SequenceOf[Ask], sharing: int) -> Int32Array:
        """As `budgets`, of drafts whose nodes are verified whether they are worth it or not, and padding as well."""
        if self._times is None:
            return self.budgets(asks, sharing)
        nodes = [worth_drafting_ahead(nodes, one.drafted, one.worth, sharing) for _, one, nodes in asks]
        return np.array(nodes, np.int32)

    def worthwhile(
        self, trees: DraftTrees, tokens: int, context: int = MEASURED_CONTEXT, longest: Int32Array | None = None
    ) -> WorthwhileTrees:
        """What of the trees of a step is worth its time.

        Args:
            tokens: that the step runs without drafts.
            context: committed tokens that each of them attends to, on average.
            longest: int32[rows], the most tokens of each chain; for a host that verifies chains.
        """
        times = self._times
        if self._verifies is Verifies.FIXED_TREES or times is None or not trees.scores.shape[0]:
            return WorthwhileTrees(trees, 0.0)
        seconds = self._seconds_with(times, trees, context)
        if longest is not None:
            return WorthwhileTrees(worthwhile_chains(trees, longest, tokens, seconds), 0.0)
        if times.per_branch:
            trees = worthwhile_branches(trees, tokens, seconds, times.per_branch)
            seconds = with_branches(self._seconds_with(times, trees, context), trees, times.per_branch)
        return WorthwhileTrees(trees, min_worthwhile_score(trees.scores, tokens, seconds))

    def _seconds_with(self, times: StepTimes, trees: DraftTrees, context: int) -> StepSeconds:
        """The seconds of a step by its tokens, which are those of the best nodes of these trees."""
        seconds = with_drafts(partial(times.between, sequences=len(trees), context=context), trees, times.per_draft)
        return seconds if self._latest_tokens is None else with_change(seconds, self._latest_tokens, times.per_change)

    def observe_step(self, size: StepSize, seconds: float | None) -> None:
        """The host made a step, which took so many seconds; None if that says nothing of others of its size."""
        changed, self._latest_tokens = self._latest_tokens != size.tokens, size.tokens
        if self._times is not None and seconds is not None:
            self._times.observe(size._replace(changed=changed), seconds)

    def observe(
        self,
        sessions: SequenceOf[DraftSession],
        accepted: Int32Array,
        size: StepSize,
        seconds: float | None,
        feedback: StepFeedback | None = None,
    ) -> None:
        """Charges the rows that wrote in a step with what their drafts cost it.

        Args:
            sessions: their `drafted` is how many nodes of each the step verified; their drafters are active.
            accepted: int32[s], how many of these were accepted.
            seconds: of the step, None if it was not measured.
            feedback: of these rows; None from a host whose drafts have no branches.
        """
        times = self._times
        if times is not None and not times.known(size.sequences):
            return
        nodes = np.array([session.drafted for session in sessions], np.int32)
        added = np.zeros(nodes.shape[0]) if times is None else added_seconds(times, nodes, size, feedback)
        if seconds is None:
            assert times is not None
            seconds = float(times.between(size.tokens, size.tokens, size.sequences, size.context)[0])
        accounts = [session.drafter.account for session in sessions if session.drafter is not None]
        step_all(accounts, seconds, accepted, added, size.sequences)

    def learn(
        self,
        sessions: SequenceOf[DraftSession],
        tokens: Int32Array,
        offsets: Int32Array,
        feedback: StepFeedback | None = None,
        on_device: Collection[DraftSession] = (),
    ) -> None:
        """Passes on to drafters, which are active, what their rows wrote; those that do not pay pause from now on.

        Args:
            tokens, offsets: session i wrote `tokens[offsets[i] : offsets[i + 1]]`.
            feedback: of these rows; None from a host that does not show the model's predictions.
            on_device: whose devices learned it already.
        """
        drafters = [session.drafter for session in sessions if session.drafter is not None]
        if learned := [i for i, session in enumerate(sessions) if session in on_device]:
            for i in learned:
                drafters[i].learned(tokens[offsets[i] : offsets[i + 1]])
            _pause([drafters[i] for i in learned if sessions[i].drafted])
            rest = [i for i, session in enumerate(sessions) if session not in on_device]
            if not rest:
                return
            drafters = [drafters[i] for i in rest]
            tokens, offsets = segments_of(tokens, offsets, rest)
            feedback = None if feedback is None else feedback.part(rest)
        observe_all(drafters, tokens, offsets, feedback)


def added_seconds(times: StepTimes, nodes: Int32Array, size: StepSize, feedback: StepFeedback | None) -> Float64Array:
    """What the nodes and branches of each draft added to a step, float64[s].

    Args:
        nodes: int32[s], of each draft.
        feedback: of the same sequences; None if no draft has branches.
    """
    widest = int(nodes.max(initial=0))
    if widest == 0:
        return np.zeros(nodes.shape[0])
    seconds = times.between(size.tokens - widest, size.tokens, size.sequences, size.context)
    added = seconds[widest] - seconds[widest - nodes]
    if size.sequences > 1:
        added += times.per_draft * (nodes > 0)
    if times.per_branch and feedback is not None:
        added += times.per_branch * branches_by_row(feedback.parents, feedback.offsets)
    return np.asarray(added)


def propose_all(drafters: SequenceOf[GuardedDrafter], budgets: Int32Array) -> DraftTrees:
    """A valid tree for each drafter, which is `ready`; empty where there is no draft, or a strategy failed.

    Args:
        budgets: int32[s], the most nodes of each, 1 or more.
    """
    groups, proposing = [], []
    for strategy, rows in _by_strategy(drafters):
        asked = drafters if len(rows) == len(drafters) else [drafters[row] for row in rows]
        given = [guarded.drafter for guarded in asked]
        calls, nodes = TimedCalls(asked), budgets if asked is drafters else budgets[rows]
        groups.append((rows, asked, calls))
        proposing.append(dispatch.proposing(strategy, given, nodes, asked[0].vocab_size, calls))
    parts = []
    proposed = dispatch.run_together(proposing, partial(draft_by_model, drafters[0].watchdog))
    for (rows, asked, calls), trees in zip(groups, proposed, strict=True):
        for guarded, size in zip(asked, segment_sizes(trees.offsets).tolist(), strict=True):
            guarded.stats.proposed_tokens += size
        calls.limit_costs()
        parts.append((rows, trees))
    return DraftTrees.scattered(parts, len(drafters))


def observe_all(
    drafters: SequenceOf[GuardedDrafter], accepted: Int32Array, offsets: Int32Array, feedback: StepFeedback | None
) -> None:
    """Passes on what sequences wrote.

    Args:
        accepted, offsets: sequence i wrote `accepted[offsets[i] : offsets[i + 1]]`.
        feedback: None from an engine that does not show the model's predictions.
    """
    taking = [i for i, guarded in enumerate(drafters) if guarded.observes_now]
    if len(taking) < len(drafters):
        written, bounds = accepted.tolist(), offsets.tolist()
        for guarded, begin, end in zip(drafters, bounds, bounds[1:], strict=False):
            if not guarded.observes_now:
                guarded.defer(written[begin:end])
    if not taking:
        return
    for strategy, rows in _by_strategy([drafters[i] for i in taking]):
        chosen = [taking[row] for row in rows]
        observing = [drafters[i] for i in chosen]
        if len(observing) == len(drafters):
            part = accepted, offsets, feedback
        else:
            part = *segments_of(accepted, offsets, chosen), None if feedback is None else feedback.part(chosen)
        calls = TimedCalls(observing)
        given = [guarded.drafter for guarded in observing]
        dispatch.observe_all(strategy, given, *part, calls)
        calls.limit_costs()
        _pause(observing)


def _pause(drafters: SequenceOf[GuardedDrafter]) -> None:
    """Those that had a draft pause from now on if it does not pay."""
    if drafting := [guarded for guarded in drafters if guarded.drafting]:
        accounts = [guarded.account for guarded in drafting]
        pauses = pause_all(accounts, [guarded.can_drop_part for guarded in drafting])
        for guarded, steps in zip(drafting, pauses, strict=True):
            guarded.pause(steps)


def _by_strategy(drafters: SequenceOf[GuardedDrafter]) -> list[tuple[Strategy, list[int]]]:
    """The strategies, and which drafters are of each."""
    only = drafters[0].strategy if drafters else None
    if only is not None and all(guarded.strategy is only for guarded in drafters):  # as in most steps
        return [(only, [*range(len(drafters))])]
    groups: dict[int, tuple[Strategy, list[int]]] = {}
    for row, guarded in enumerate(drafters):
        assert guarded.strategy is not None
        groups.setdefault(id(guarded.strategy), (guarded.strategy, []))[1].append(row)
    return [*groups.values()]


def segments_of(values: Int32Array, offsets: Int32Array, chosen: SequenceOf[int]) -> tuple[Int32Array, Int32Array]:
    """Some of the segments of a flat array, and their offsets."""
    entries, of_chosen = segment_indices(offsets, chosen)
    return values[entries], of_chosen
