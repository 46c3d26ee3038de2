"""Asks a strategy for several sequences at once: in one call where it offers that, else drafter by drafter.

A fault stays with the sequence that it happens for: where a call for all fails, each is asked alone. One that took too
long is not repeated, as each of them may take as long: it is the fault of all.

What the strategies of a step ask of a model is one call of it, whichever tenants they are of, see `run_together`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol, TypeGuard

import numpy as np

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import (
    BatchStrategy,
    DraftsBeside,
    ModelAnswer,
    ModelAsk,
    Proposing,
    StepFeedback,
    Strategy,
)
from draftwood_strategies.draft import EMPTY_TREE, DraftTrees, checked, checked_all


class Calls(Protocol):
    """What becomes of the faults and the time of calls for some sequences, which are numbered."""

    def failed(self, i: int, method: str, error: Exception) -> None:
        """A call for a sequence, of "propose" or "observe", raised this."""

    def timed(self, sequences: SequenceOf[int], owner: object, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(*args)` and returns what it does; takes its time for the sequences of these numbers."""

    def charge(self, seconds: float) -> None:
        """A model that was asked for all of them took so long for each."""


def proposing(
    strategy: Strategy,
    drafters: SequenceOf[Any],
    budgets: Int32Array,
    vocab_size: int | None,
    calls: Calls,
    others: DraftTrees | None = None,
) -> Proposing:
    """For each drafter its checked draft; an empty one for a drafter that failed.

    Args:
        drafters: of this strategy, at least one.
        budgets: int32[s], the most nodes of each draft, 1 or more.
        vocab_size: tokens are below it; None for any.
        others: for a strategy that drafts beside others, what these draft (`DraftsBeside`).
    """
    try:
        if (call := _asking(strategy, drafters, budgets, others)) is not None:
            proposed = yield from _between_asks(call, strategy, len(drafters), calls)
            return checked_all(proposed, budgets, vocab_size)
        if _supports_batches(strategy):
            proposed = calls.timed(range(len(drafters)), strategy, strategy.propose_all, drafters, budgets)
            return checked_all(proposed, budgets, vocab_size)
    except Exception as error:
        if len(drafters) == 1 or isinstance(error, TimeoutError):
            for i in range(len(drafters)):
                calls.failed(i, "propose", error)
            return DraftTrees.empty(len(drafters))
    trees = []
    for i, (drafter, budget) in enumerate(zip(drafters, budgets.tolist(), strict=True)):
        try:
            trees.append(checked(calls.timed([i], drafter, drafter.propose, budget), budget, vocab_size))
        except Exception as error:
            calls.failed(i, "propose", error)
            trees.append(EMPTY_TREE)
    return DraftTrees.of(trees)


def _asking(
    strategy: Any, drafters: SequenceOf[Any], budgets: Int32Array, others: DraftTrees | None
) -> Proposing | None:
    """The call of a strategy that may ask models; None for another one."""
    call: Proposing | None = None
    if others is not None and isinstance(strategy, DraftsBeside):
        call = strategy.propose_beside(drafters, budgets, others)
    elif hasattr(strategy, "propose_asking"):
        call = strategy.propose_asking(drafters, budgets)
    return call


def _between_asks(call: Proposing, strategy: Strategy, drafters: int, calls: Calls) -> Proposing:
    """Passes on what a call asks and is answered, and takes the time of what it does in between."""
    go_on: Callable[..., ModelAsk] = call.send
    received: Any = None
    while True:
        try:
            ask = calls.timed(range(drafters), strategy, go_on, received)
        except StopIteration as end:
            trees: DraftTrees = end.value
            return trees
        try:
            answer = yield ask
        except Exception as error:
            go_on, received = call.throw, error
        else:
            calls.charge(answer.seconds / drafters)
            go_on, received = call.send, answer


def draft_by_model(ask: ModelAsk) -> ModelAnswer:
    """What a model answers."""
    started = time.perf_counter()
    trees = ask.source.draft(ask.rows, ask.budgets, ask.levels, ask.least)
    return ModelAnswer(trees, time.perf_counter() - started)


def run_together(
    calls: SequenceOf[Proposing], draft: Callable[[ModelAsk], ModelAnswer] = draft_by_model
) -> list[DraftTrees]:
    """What each call returns. What they wait for of the same model is one call of it.

    Raises:
        Exception: what one of them raises.
    """
    returned: dict[int, DraftTrees] = {}
    asks: dict[int, ModelAsk] = {}

    def go_on(number: int, step: Callable[..., ModelAsk], received: Any) -> None:
        try:
            asks[number] = step(received)
        except StopIteration as end:
            returned[number] = end.value

    for number, call in enumerate(calls):
        go_on(number, call.send, None)
    while asks:
        source = next(iter(asks.values())).source
        asking = [number for number, ask in asks.items() if ask.source is source]
        answers = _answers([asks.pop(number) for number in asking], draft)
        for number, answer in zip(asking, answers, strict=True):
            failed = isinstance(answer, Exception)
            go_on(number, calls[number].throw if failed else calls[number].send, answer)
    return [returned[number] for number in range(len(calls))]


def _answers(asks: list[ModelAsk], draft: Callable[[ModelAsk], ModelAnswer]) -> list[ModelAnswer | Exception]:
    """What a model answers to each, or raises for it; each is asked alone if it fails for all together."""
    try:
        if len(asks) == 1:
            return [draft(asks[0])]
        return [*_shared(draft(_joined(asks)), asks)]
    except Exception as error:
        if len(asks) == 1 or isinstance(error, TimeoutError):
            return [error] * len(asks)
    return [answer for ask in asks for answer in _answers([ask], draft)]


def _joined(asks: list[ModelAsk]) -> ModelAsk:
    return ModelAsk(
        asks[0].source,
        [row for ask in asks for row in ask.rows],
        np.concatenate([ask.budgets for ask in asks]),
        np.concatenate([ask.levels for ask in asks]),
        np.concatenate([ask.least for ask in asks]),
    )


def _shared(answer: ModelAnswer, asks: list[ModelAsk]) -> list[ModelAnswer]:
    """Of an answer to all, that to each. The time is shared by the levels that they ask for, so that one tenant does
    not pay for another's drafts; by their rows if none does."""
    levels = [int(ask.levels.sum()) for ask in asks]
    shares, begin, parts = levels if any(levels) else [len(ask.rows) for ask in asks], 0, []
    for ask, share in zip(asks, shares, strict=True):
        end = begin + len(ask.rows)
        parts.append(ModelAnswer(answer.trees.part(begin, end), answer.seconds * share / sum(shares)))
        begin = end
    return parts


def observe_all(
    strategy: Strategy,
    drafters: SequenceOf[Any],
    accepted: Int32Array,
    offsets: Int32Array,
    feedback: StepFeedback | None,
    calls: Calls,
) -> None:
    """Passes on what a step wrote, see `BatchStrategy.observe_all`."""
    try:
        if _supports_batches(strategy):
            calls.timed(range(len(drafters)), strategy, strategy.observe_all, drafters, accepted, offsets, feedback)
            return
    except Exception as error:
        if len(drafters) == 1 or isinstance(error, TimeoutError):
            for i in range(len(drafters)):
                calls.failed(i, "observe", error)
            return
    bounds = offsets.tolist()
    for i, drafter in enumerate(drafters):
        try:
            shown = None if feedback is None else feedback.feedback(i, strategy.top_k)
            calls.timed([i], drafter, drafter.observe, accepted[bounds[i] : bounds[i + 1]], shown)
        except Exception as error:
            calls.failed(i, "observe", error)


def _supports_batches(strategy: Strategy) -> TypeGuard[BatchStrategy]:
    """As `isinstance`, which takes longer than a draft: it looks up every member of the protocol."""
    return hasattr(strategy, "propose_all") and hasattr(strategy, "observe_all")
