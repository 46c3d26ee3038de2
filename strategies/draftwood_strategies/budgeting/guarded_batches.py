"""Drafts for all sequences of a step, of any strategies, whatever these do wrong."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from draftwood_strategies import dispatch
from draftwood_strategies.base import StepFeedback, Strategy
from draftwood_strategies.budgeting.draft_account import pause_all
from draftwood_strategies.budgeting.guarded_drafter import GuardedDrafter
from draftwood_strategies.budgeting.timed_calls import TimedCalls
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.native import Int32Array, segment_indices, segment_sizes


def propose_all(drafters: SequenceOf[GuardedDrafter], budgets: Int32Array) -> DraftTrees:
    """A valid tree for each drafter, which is `ready`; empty where there is no draft, or a strategy failed.

    Args:
        budgets: int32[s], the most nodes of each, 1 or more.
    """
    parts = []
    for strategy, rows in _by_strategy(drafters):
        asked = drafters if len(rows) == len(drafters) else [drafters[row] for row in rows]
        given = [one.drafter for one in asked]
        of_rows = budgets if asked is drafters else budgets[rows]
        calls = TimedCalls(asked)
        trees = dispatch.propose_all(strategy, given, of_rows, asked[0].vocab_size, calls.failed, calls.timed)
        for one, nodes in zip(asked, segment_sizes(trees.offsets).tolist(), strict=True):
            one.stats.proposed_tokens += nodes
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
    taking = [i for i, one in enumerate(drafters) if one.observes_now]
    if len(taking) < len(drafters):
        written, bounds = accepted.tolist(), offsets.tolist()
        for one, begin, end in zip(drafters, bounds, bounds[1:], strict=False):
            if not one.observes_now:
                one.defer(written[begin:end])
    if not taking:
        return
    for strategy, rows in _by_strategy([drafters[i] for i in taking]):
        chosen = [taking[row] for row in rows]
        taking_now = [drafters[i] for i in chosen]
        if len(taking_now) == len(drafters):
            part = accepted, offsets, feedback
        else:
            part = *segments_of(accepted, offsets, chosen), None if feedback is None else feedback.part(chosen)
        calls = TimedCalls(taking_now)
        dispatch.observe_all(strategy, [one.drafter for one in taking_now], *part, calls.failed, calls.timed)
        calls.limit_costs()
        if drafting := [one for one in taking_now if one.drafting]:
            pauses = pause_all([one.account for one in drafting], [one.can_drop_part for one in drafting])
            for one, steps in zip(drafting, pauses, strict=True):
                one.pause(steps)


def _by_strategy(drafters: SequenceOf[GuardedDrafter]) -> list[tuple[Strategy, list[int]]]:
    """The strategies, and which drafters are of each."""
    only = drafters[0].strategy if drafters else None
    if only is not None and all(one.strategy is only for one in drafters):  # as in most steps
        return [(only, [*range(len(drafters))])]
    groups: dict[int, tuple[Strategy, list[int]]] = {}
    for row, one in enumerate(drafters):
        assert one.strategy is not None
        groups.setdefault(id(one.strategy), (one.strategy, []))[1].append(row)
    return [*groups.values()]


def segments_of(values: Int32Array, offsets: Int32Array, chosen: SequenceOf[int]) -> tuple[Int32Array, Int32Array]:
    """Some of the segments of a flat array, and their offsets."""
    entries, of_chosen = segment_indices(offsets, chosen)
    return values[entries], of_chosen
