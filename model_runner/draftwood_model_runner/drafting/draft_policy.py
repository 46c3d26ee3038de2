"""How much to draft, decided in one place, for each step and sequence. No torch.

A draft passes these decisions, in this order:
1. While prompts wait for further steps, nothing is drafted; sequences whose drafts pay skip steps (`_may_skip`).
2. A drafter whose drafts do not pay pauses, and one that is too slow is switched off (`draft_account`).
3. A tree has at most the nodes that the request allows, is no deeper than what is left to write, and keeps to the
   limits of the runner.
4. Of all trees of a step, the nodes are verified that are worth their time by the step-time model (`budget`).
Which sources of a hybrid are asked is decided by the hybrid itself: that changes what a draft costs, not how much of
it is verified.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from draftwood_model_runner.drafting.budget import worthwhile_score
from draftwood_model_runner.drafting.draft_account import Payoff
from draftwood_model_runner.drafting.guarded_drafter import GuardedDrafter
from draftwood_model_runner.drafting.step_time import StepTimes
from draftwood_model_runner.drafting.watchdog import Watchdog
from draftwood_model_runner.runners.base import DraftLimits, StepBatch
from draftwood_model_runner.scheduling.scheduler import Work
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import EMPTY_TREE, DraftTree, Feedback
from draftwood_strategies.draft import merged

_log = logging.getLogger(__name__)

_MOST_SKIPPED = 3
"""Steps that a sequence skips while prompts wait, at most, one after another. Not tuned."""
_WORTH_SKIPPING = 0.5
"""Tokens of the drafts of a sequence that must be accepted, on average, for it to skip steps. Not tuned."""
_REMEMBERED_PAYOFFS = 4096
"""Arms and strategies of tenants whose payoff is remembered; the least recently used one is dropped."""


class Draft(NamedTuple):
    """The work of a sequence that takes part in the step, and its draft."""

    work: Work
    tree: DraftTree


class Outcome(NamedTuple):
    """What came of a step for one sequence.

    Attributes:
        token_ids: what it wrote.
        accepted_drafts: how many of them were drafted.
        feedback: the predictions of the model at every node.
        model_seconds: what the forward pass took.
        sharing: how many sequences shared it.
    """

    token_ids: list[int]
    accepted_drafts: int
    feedback: Feedback
    model_seconds: float
    sharing: int


@dataclass(eq=False, slots=True)
class _State:
    """Drafting of one sequence, from its first step to its end."""

    drafter: GuardedDrafter
    skipped: int = 0
    """Steps that it skipped since it last wrote."""


class DraftPolicy:
    """Drafts for all sequences of an engine. One thread calls all methods.

    Args:
        vocab_size: draft tokens are below it.
        draft_limits: as `Runner.draft_limits`.
        step_times: the step-time model; None verifies all that strategies propose.
        watchdog: interrupts strategies that do not return; None for no limit.

    Attributes:
        failures: for each strategy, by name, how many sequences it was switched off for.
    """

    def __init__(
        self,
        vocab_size: int,
        draft_limits: Callable[[int], DraftLimits],
        step_times: StepTimes | None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._vocab_size = vocab_size
        self._draft_limits = draft_limits
        self._step_times = step_times
        self._watchdog = watchdog
        self._payoff = lru_cache(_REMEMBERED_PAYOFFS)(lambda *drafts: Payoff())
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
        """Prepares to draft for a sequence."""
        request = sequence.request
        payoff = self._payoff(request.tenant, request.arm, request.strategy_name, request.strategy_options)
        drafter = GuardedDrafter(sequence, self._vocab_size, self.failures, payoff, self._watchdog)
        self._states[sequence] = _State(drafter)

    def close(self, sequence: Sequence) -> None:
        """Closes the drafter of a sequence, if there is one."""
        state = self._states.pop(sequence, None)
        if state is not None:
            state.drafter.close()

    def propose(self, plan: SequenceOf[Work], prompts_wait: bool) -> list[Draft]:
        """Which work of the plan is done in this step, each with its draft.

        A prompt that needs further steps waits for each of them to end. So nothing is drafted then, and sequences
        whose drafts pay skip a few steps altogether: one step with a draft makes up for them afterwards.

        Args:
            prompts_wait: as `Plan.prompts_wait`.
        """
        drafts = []
        for work in plan:
            state = self._states[work.sequence]
            if prompts_wait and _may_skip(work, state):
                state.skipped += 1
                continue
            asked = work.reaches_end and (not prompts_wait or state.skipped == _MOST_SKIPPED)
            state.skipped = 0
            drafts.append(Draft(work, self._draft(work.sequence, state.drafter) if asked else EMPTY_TREE))
        return drafts

    def least_score(self, drafts: SequenceOf[Draft]) -> float:
        """The score below which draft nodes are not worth their time in this step."""
        if self._step_times is None:
            return 0.0
        tokens = sum(draft.work.tokens for draft in drafts)
        context = sum(draft.work.tokens * draft.work.sequence.committed for draft in drafts) // tokens
        step_times = partial(self._step_times.between, sequences=len(drafts), context=context)
        return worthwhile_score([draft.tree for draft in drafts], tokens, step_times)

    def top_k(self, drafts: SequenceOf[Draft]) -> int:
        """How many of the most probable tokens at each node the drafters of the step need, at most."""
        return max(self._states[draft.work.sequence].drafter.top_k for draft in drafts)

    def observe_step(self, batch: StepBatch, seconds: float) -> None:
        """The model took so many seconds for a batch."""
        self._latest, self._context = batch, batch.mean_context
        if self._step_times is not None:
            self._step_times.observe(batch.size, batch.rows, seconds, self._context)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """A step in which a sequence wrote tokens."""
        drafter = self._states[sequence].drafter
        verifying = self._verifying_seconds(len(outcome.feedback.tokens) - 1)
        drafter.account.step(outcome.model_seconds, outcome.accepted_drafts, outcome.sharing, verifying)
        drafter.observe(outcome.token_ids, outcome.feedback)

    def feedback_top_k(self, sequence: Sequence) -> int:
        """How many of the most probable tokens at each node the drafter of a sequence needs."""
        return self._states[sequence].drafter.top_k

    def _verifying_seconds(self, nodes: int) -> float:
        """What so many nodes added to the latest step, by the step-time model."""
        batch = self._latest
        if self._step_times is None or batch is None or nodes == 0:
            return 0.0
        sizes = batch.size, batch.size - nodes
        whole, without = (self._step_times.at(size, batch.rows, self._context) for size in sizes)
        return whole - without

    def _draft(self, sequence: Sequence, drafter: GuardedDrafter) -> DraftTree:
        """What to verify after a sequence that is committed but for its last token.

        The first token of the output waits for no drafter. Tokens that the grammar forces are a draft at no cost; with
        one whose masks are slow, a step writes one token only.
        """
        if sequence.grammar is not None and sequence.grammar.slow:
            return EMPTY_TREE
        left, nodes = sequence.request.stop.max_tokens - len(sequence.output), sequence.request.max_draft_nodes
        if left <= 1 or nodes == 0:
            return EMPTY_TREE
        limits = self._draft_limits(sequence.length - 1)
        tree = drafter.propose(nodes) if sequence.output else EMPTY_TREE
        forced = forced_tokens(sequence)[:nodes]
        if forced:
            tree = merged([DraftTree.of(forced), tree])
        if not limits.branches:
            tree = best_chain(tree)
        return within_depth(tree.pruned(min(nodes, limits.nodes)), min(left - 1, limits.levels))


def _may_skip(work: Work, state: _State) -> bool:
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


def best_chain(tree: DraftTree) -> DraftTree:
    """The path of the tree from its root that is accepted furthest on average: the sum of its scores is largest."""
    if not len(tree):
        return tree
    parents, sums = tree.parents.tolist(), tree.scores.astype(np.float64)
    for node, parent in enumerate(parents):
        sums[node] += sums[parent] if parent >= 0 else 0.0
    path = [int(sums.argmax())]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    nodes = np.array(path[::-1])
    return DraftTree(tree.tokens[nodes], np.arange(-1, nodes.size - 1, dtype=np.int32), tree.scores[nodes])


def within_depth(tree: DraftTree, depth: int) -> DraftTree:
    """The nodes of the tree that lie fewer than `depth` levels deep."""
    if depth <= 0:
        return EMPTY_TREE
    if len(tree) <= depth or tree.depths.max() < depth:
        return tree
    kept = tree.depths < depth
    index = np.cumsum(kept, dtype=np.int32) - 1
    parents = tree.parents[kept]
    parents = np.where(parents < 0, parents, index[parents]).astype(np.int32)
    return DraftTree(tree.tokens[kept], parents, tree.scores[kept])
