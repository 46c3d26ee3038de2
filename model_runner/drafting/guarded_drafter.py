"""A drafter that cannot do harm: whatever a strategy does wrong, its sequence goes on at plain speed. No torch."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter

import numpy as np

from model_runner.drafting.draft_account import DraftAccount, Payoff
from model_runner.sequence import Sequence
from strategies import EMPTY_TREE, Drafter, DraftTree, Feedback, Strategy
from strategies.base import Composite
from strategies.draft import checked, merged

_log = logging.getLogger(__name__)


class GuardedDrafter:
    """One sequence's drafter: times it, checks its trees, and switches it off when it fails or does not pay.

    The strategy starts it when it is first asked for a draft: while prompts wait nobody drafts, and starting one would
    hold them up.

    Args:
        sequence: drafts are for it; its statistics take the time spent, what came of each source, and the reason why
            drafting was switched off.
        vocab_size: a draft token is below it.
        failures: counts the sequences that each strategy, by name, was switched off for.
        payoff: what this tenant's drafts by the same strategy bring; it is kept up to date.
    """

    def __init__(self, sequence: Sequence, vocab_size: int, failures: Counter[str], payoff: Payoff) -> None:
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._failures = failures
        self._account = DraftAccount(sequence.stats, payoff)
        self._unstarted = sequence.strategy
        self._drafter: Drafter | None = None
        self._top_k = 0
        self._pause = 0
        self._silent = self._asked = False
        self._unseen: list[int] = []

    @property
    def active(self) -> bool:
        """It drafts, or will when it is asked."""
        return self._drafter is not None or self._unstarted is not None

    @property
    def expected(self) -> float:
        """How many tokens of the next draft will be accepted, as far as is known."""
        if not self.active or self._pause > 0 or self._sequence.max_draft_nodes == 0:
            return 0.0
        return self._account.expected

    @property
    def top_k(self) -> int:
        """How many of the model's most probable tokens the next `observe` wants to see at each node."""
        return 0 if self._silent else self._top_k

    def propose(self, budget: int) -> DraftTree:
        """A lawful tree of at most `budget` nodes, empty where there is no draft, or drafts have not paid lately."""
        self._silent = self._pause > 0
        if self._silent:
            self._pause -= 1
            return EMPTY_TREE
        self._catch_up()
        drafter = self._drafter
        if drafter is None or budget <= 0:
            return EMPTY_TREE
        self._asked = True
        started = time.perf_counter()
        tree = EMPTY_TREE
        try:
            tree = checked(drafter.propose(budget), budget, self._vocab_size)
        except Exception as error:
            self._switch_off(_raised("propose", error), error)
        self._charge(drafter, "propose", started)
        return tree

    def observe(self, accepted: list[int], feedback: Feedback) -> None:
        """Tells the drafter what was accepted; where it was not to draft, later."""
        if self._silent or self._unstarted is not None:
            self._unseen += accepted
        elif self._drafter is not None:
            self._observe(accepted, feedback)
            if self._asked:
                self._asked = False
                self._pause = self._account.pause()

    def close(self) -> None:
        """Closes the drafter; further calls do nothing."""
        if self._unseen:
            self._catch_up()
        drafter, self._drafter, self._unstarted = self._drafter, None, None
        if drafter is None:
            return
        try:
            try:
                if isinstance(drafter, Composite):
                    self._sequence.stats.by_source = dict(drafter.by_source)
            finally:
                drafter.close()
        except Exception as error:
            if not self._sequence.stats.drafting_disabled_reason:
                self._switch_off(_raised("close", error), error)

    def _catch_up(self) -> None:
        """Starts the drafter where that was not done, and tells it what was written while it was not asked."""
        if self._unstarted is not None:
            strategy, self._unstarted = self._unstarted, None
            self._start(strategy)
        if self._unseen:
            unseen, self._unseen = self._unseen, []
            self._observe(unseen, None)

    def _observe(self, accepted: list[int], feedback: Feedback | None) -> None:
        drafter = self._drafter
        if drafter is not None:
            started = time.perf_counter()
            try:
                drafter.observe(np.array(accepted, np.int32), feedback)
            except Exception as error:
                self._switch_off(_raised("observe", error), error)
            self._charge(drafter, "observe", started)

    def _start(self, strategy: Strategy) -> None:
        started = time.perf_counter()
        try:
            top_k = int(strategy.top_k)
            if not 0 <= top_k <= self._vocab_size:
                raise ValueError(f"top_k: {top_k} is not allowed; it must lie in [0, {self._vocab_size}]")
            self._drafter = strategy.start(self._sequence.prompt.copy())
            self._top_k = top_k
            if isinstance(self._drafter, Composite):
                self._drafter.limit_tokens(self._vocab_size)
        except Exception as error:
            self._switch_off(_raised("start", error), error)
        seconds = time.perf_counter() - started
        self._sequence.stats.draft_seconds += seconds
        self._account.charge(strategy, "start", seconds)

    def _charge(self, drafter: Drafter, call: str, started: float) -> None:
        """What a call since `started` took; too much of it, and drafting ends."""
        seconds = time.perf_counter() - started
        self._sequence.stats.draft_seconds += seconds
        self._account.charge(drafter, call, seconds)
        if reason := self._account.verdict():
            self._slow(drafter, reason)

    def _slow(self, drafter: Drafter, reason: str) -> None:
        """Parts with the part that costs most, or with the whole drafter."""
        if self._drafter is None:
            return
        try:
            spared = drafter.drop_slowest() if isinstance(drafter, Composite) else ""
        except Exception as error:
            self._switch_off(_raised("drop_slowest", error), error)
            return
        if spared:
            self._account.clear()
        else:
            self._switch_off(reason)

    def _switch_off(self, reason: str, error: Exception | None = None) -> None:
        _log.error(
            "strategy %r is switched off for request %r: %s",
            self._sequence.strategy_name,
            self._sequence.request_id,
            reason,
            exc_info=error,
        )
        self._failures[self._sequence.strategy_name] += 1
        self._sequence.stats.drafting_disabled_reason = reason
        self.close()


def _raised(call: str, error: Exception) -> str:
    return f"{call} raised {type(error).__name__}: {error}"


def draft_for(
    sequence: Sequence, drafter: GuardedDrafter, deepest: int = sys.maxsize, most: int = sys.maxsize
) -> DraftTree:
    """What to verify after a sequence, as deep and as large as allowed, and no deeper than what is left to write, less
    the model's own token.

    The first token waits for no drafter. Where a grammar allows one token only, that is a draft that costs nothing to
    make.
    """
    left, nodes = sequence.stop.max_tokens - len(sequence.output), sequence.max_draft_nodes
    if left <= 1 or nodes == 0:
        return EMPTY_TREE
    tree = drafter.propose(nodes) if sequence.output else EMPTY_TREE
    forced = forced_tokens(sequence)[:nodes]
    if forced:
        tree = merged([DraftTree.of(forced), tree])
    return within_depth(tree.pruned(min(nodes, most)), min(left - 1, deepest))


def forced_tokens(sequence: Sequence) -> list[int]:
    """The tokens that the sequence's grammar forces next; none where it fails: they would only have been a draft."""
    if sequence.grammar is None:
        return []
    try:
        return sequence.grammar.forced()
    except Exception:
        _log.exception("the grammar of request %r cannot tell what it forces", sequence.request_id)
        return []


def within_depth(tree: DraftTree, depth: int) -> DraftTree:
    """The tree's nodes that lie fewer than `depth` levels deep."""
    if depth <= 0:
        return EMPTY_TREE
    if len(tree) <= depth or tree.depths.max() < depth:
        return tree
    kept = tree.depths < depth
    index = np.cumsum(kept, dtype=np.int32) - 1
    parents = tree.parents[kept]
    parents = np.where(parents < 0, parents, index[parents]).astype(np.int32)
    return DraftTree(tree.tokens[kept], parents, tree.scores[kept])
