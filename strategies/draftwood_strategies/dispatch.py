"""Asks a strategy for several sequences at once: in one call where it offers that, else drafter by drafter.

A fault stays with the sequence that it happens for: where a call for all fails, each is asked alone. One that took too
long is not repeated, as each of them may take as long: it is the fault of all.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol, TypeGuard

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import BatchStrategy, DraftsBeside, StepFeedback, Strategy
from draftwood_strategies.draft import EMPTY_TREE, DraftTrees, checked, checked_all

OnFailure = Callable[[int, str, Exception], None]
"""Called with the number of a sequence, "propose" or "observe", and what that raised."""


class TimedCall(Protocol):
    """Calls `function(*args)` and returns what it does; takes its time for the sequences of these numbers."""

    def __call__(self, sequences: SequenceOf[int], owner: object, function: Callable[..., Any], *args: Any) -> Any: ...


def propose_all(
    strategy: Strategy,
    drafters: SequenceOf[Any],
    budgets: Int32Array,
    vocab_size: int | None,
    failed: OnFailure,
    timed: TimedCall,
    others: DraftTrees | None = None,
) -> DraftTrees:
    """For each drafter its checked draft; an empty one for a drafter that failed.

    Args:
        drafters: of this strategy, at least one.
        budgets: int32[s], the most nodes of each draft, 1 or more.
        vocab_size: tokens are below it; None for any.
        others: for a strategy that drafts beside others, what these draft (`DraftsBeside`).
    """
    try:
        if others is not None and isinstance(strategy, DraftsBeside):
            proposed = timed(range(len(drafters)), strategy, strategy.propose_beside, drafters, budgets, others)
            return checked_all(proposed, budgets, vocab_size)
        if _supports_batches(strategy):
            proposed = timed(range(len(drafters)), strategy, strategy.propose_all, drafters, budgets)
            return checked_all(proposed, budgets, vocab_size)
    except Exception as error:
        if len(drafters) == 1 or isinstance(error, TimeoutError):
            for i in range(len(drafters)):
                failed(i, "propose", error)
            return DraftTrees.empty(len(drafters))
    trees = []
    for i, (drafter, budget) in enumerate(zip(drafters, budgets.tolist(), strict=True)):
        try:
            trees.append(checked(timed([i], drafter, drafter.propose, budget), budget, vocab_size))
        except Exception as error:
            failed(i, "propose", error)
            trees.append(EMPTY_TREE)
    return DraftTrees.of(trees)


def observe_all(
    strategy: Strategy,
    drafters: SequenceOf[Any],
    accepted: Int32Array,
    offsets: Int32Array,
    feedback: StepFeedback | None,
    failed: OnFailure,
    timed: TimedCall,
) -> None:
    """Passes on what a step wrote, see `BatchStrategy.observe_all`."""
    try:
        if _supports_batches(strategy):
            timed(range(len(drafters)), strategy, strategy.observe_all, drafters, accepted, offsets, feedback)
            return
    except Exception as error:
        if len(drafters) == 1 or isinstance(error, TimeoutError):
            for i in range(len(drafters)):
                failed(i, "observe", error)
            return
    bounds = offsets.tolist()
    for i, drafter in enumerate(drafters):
        try:
            shown = None if feedback is None else feedback.feedback(i, strategy.top_k)
            timed([i], drafter, drafter.observe, accepted[bounds[i] : bounds[i + 1]], shown)
        except Exception as error:
            failed(i, "observe", error)


def _supports_batches(strategy: Strategy) -> TypeGuard[BatchStrategy]:
    """As `isinstance`, which takes longer than a draft: it looks up every member of the protocol."""
    return hasattr(strategy, "propose_all") and hasattr(strategy, "observe_all")
