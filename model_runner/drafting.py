"""A drafter that cannot do harm: whatever a strategy does wrong, its sequence goes on at plain speed. No torch."""

from __future__ import annotations

import logging
import time

import numpy as np

from model_runner.sequence import Sequence
from strategies import EMPTY_TREE, Drafter, DraftTree, Feedback, MalformedTreeError

_log = logging.getLogger(__name__)


class GuardedDrafter:
    """One sequence's drafter: times it, checks its trees, and switches it off at its first error.

    Args:
        sequence: drafts are for it; its statistics take the time spent and the reason why drafting was switched off.
        vocab_size: a draft token is below it.
    """

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._drafter: Drafter | None = None
        self.top_k = 0
        strategy = sequence.strategy
        if strategy is None:
            return
        started = time.perf_counter()
        try:
            self.top_k = int(strategy.top_k)
            self._drafter = strategy.start(sequence.prompt)
        except Exception as error:
            self._switch_off("start", error)
        sequence.stats.draft_seconds += time.perf_counter() - started

    @property
    def active(self) -> bool:
        return self._drafter is not None

    def propose(self, budget: int) -> DraftTree:
        """A lawful tree of at most `budget` nodes, empty where there is no draft."""
        if self._drafter is None or budget <= 0:
            return EMPTY_TREE
        started = time.perf_counter()
        tree = EMPTY_TREE
        try:
            proposed = self._drafter.propose(budget)
            if not isinstance(proposed, DraftTree):
                proposed = DraftTree(proposed.tokens, proposed.parents, proposed.scores)
            proposed.check(self._vocab_size)
            if len(proposed) > budget:
                raise MalformedTreeError(f"a draft has at most {budget} nodes, not {len(proposed)}")
            tree = proposed
        except Exception as error:
            self._switch_off("propose", error)
        self._sequence.stats.draft_seconds += time.perf_counter() - started
        return tree

    def observe(self, accepted: list[int], feedback: Feedback) -> None:
        """Tells the drafter what was accepted."""
        if self._drafter is None:
            return
        started = time.perf_counter()
        try:
            self._drafter.observe(np.array(accepted, np.int32), feedback)
        except Exception as error:
            self._switch_off("observe", error)
        self._sequence.stats.draft_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Closes the drafter; further calls do nothing."""
        drafter, self._drafter = self._drafter, None
        if drafter is not None:
            try:
                drafter.close()
            except Exception as error:
                self._switch_off("close", error)

    def _switch_off(self, call: str, error: Exception) -> None:
        reason = f"{call} raised {type(error).__name__}: {error}"
        _log.error(
            "strategy %r is switched off for request %r: %s",
            self._sequence.strategy_name,
            self._sequence.request_id,
            reason,
            exc_info=error,
        )
        self._sequence.stats.drafting_disabled_reason = reason
        if call != "close":
            self.close()


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
    if len(tree) == 0 or tree.depths.max() < depth:
        return tree
    kept = tree.depths < depth
    index = np.cumsum(kept, dtype=np.int32) - 1
    parents = tree.parents[kept]
    parents = np.where(parents < 0, parents, index[parents]).astype(np.int32)
    return DraftTree(tree.tokens[kept], parents, tree.scores[kept])
