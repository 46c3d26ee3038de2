"""Measures what steps cost on this machine, with the model itself on made-up tokens. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from draftwood_model_runner.runners.base import Runner, StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_strategies.budgeting.step_time import (
    MEASURED_CONTEXT,
    ContextCost,
    Measured,
    StepTimeCurve,
    StepTimes,
    measure,
)
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, Int32Array

_SEVERAL = 4
"""Sequences of the steps that show what each further one adds, and its draft."""
_ROUNDS = 8
_LEAST_DRAFT_COST = 0.02
"""Share of the step of several drafts that they cost beside their tokens at least; less is noise."""
_LONG_CONTEXT, _SOME_TOKENS = 1024, 16
"""Context and tokens of the steps that show what longer contexts add."""


def measure_step_times(runner: Runner, max_context: int, largest: int) -> StepTimes:
    """What tokens cost, up to `largest` of one sequence, and what each further sequence, its draft, longer contexts and a
    change of the number of tokens add.

    Takes a second or two.
    """
    curve, change = measure_curve(runner, max_context, largest, limit=1.0)
    several = measure_curve(runner, max_context, 1, limit=0.1, sequences=_SEVERAL).curve
    per_sequence = max(several.at(1) - curve.at(_SEVERAL), 0.0) / (_SEVERAL - 1)
    return StepTimes(
        curve,
        per_sequence,
        _context_cost(runner, max_context, curve),
        per_draft=_draft_cost(runner, max_context, curve, per_sequence),
        per_change=change,
    )


def measure_curve(
    runner: Runner,
    max_context: int,
    largest: int,
    *,
    limit: float,
    context: int = MEASURED_CONTEXT,
    sequences: int = 1,
) -> Measured:
    """What a step costs by the number of tokens of each sequence.

    Args:
        max_context: of the model; `context` is cut to half of it, and `largest` to the rest.
        limit: seconds after which no further round of measurements begins.
        context: committed tokens of each sequence.
        sequences: how many share the step.
    """
    context = min(context, max_context // 2)
    largest = min(largest, max_context - context)

    def seconds(size: int) -> float:
        return _seconds(runner, _batch(runner, context, [np.zeros(size, np.int32)] * sequences, EMPTY_TREE))

    return measure(seconds, largest, limit)


def _draft_cost(runner: Runner, max_context: int, curve: StepTimeCurve, per_sequence: float) -> float:
    """What every further sequence with a draft adds beside its tokens, from a step of several small drafts."""
    context = min(MEASURED_CONTEXT, max_context // 2)
    tree = DraftTree.of([0, 1], [-1, -1] if runner.draft_limits(context).branches else [-1, 0])
    if max_context - context < 1 + len(tree):
        return 0.0
    batch = _batch(runner, context, [np.zeros(1, np.int32)] * _SEVERAL, tree)
    taken = min(_seconds(runner, batch) for _ in range(_ROUNDS))
    longer = taken - curve.at(batch.size) - (_SEVERAL - 1) * per_sequence
    return longer / (_SEVERAL - 1) if longer > _LEAST_DRAFT_COST * taken else 0.0


def _batch(runner: Runner, context: int, chains: Sequence[Int32Array], tree: DraftTree) -> StepBatch:
    """A step of made-up sequences, each with a chain and the draft tree under it."""
    most = context + max(chain.size for chain in chains) + len(tree)
    needed = np.arange(-(-most // runner.page_size), dtype=np.int32)
    # What is in the pages makes no difference, so that in a small memory sequences may have some in common.
    tables = [(needed + i * needed.size) % runner.pages for i in range(len(chains))]
    rows = [BatchRow(pages, context, chain, tree, 0) for pages, chain in zip(tables, chains, strict=True)]
    return replace(lay_out(rows), made_up=True)


def _seconds(runner: Runner, batch: StepBatch) -> float:
    started = time.perf_counter()
    runner.step(batch, 0)
    return time.perf_counter() - started


def _context_cost(runner: Runner, max_context: int, curve: StepTimeCurve) -> ContextCost:
    """What positions beyond the measured context add, from two sizes of step with a longer one."""
    beyond = min(_LONG_CONTEXT, max_context // 2) - MEASURED_CONTEXT
    tokens = min(_SOME_TOKENS, max_context // 2)
    if beyond < MEASURED_CONTEXT or tokens < 2:
        return ContextCost()
    long = measure_curve(runner, max_context, tokens, limit=0.1, context=MEASURED_CONTEXT + beyond).curve
    one, some = (max(long.at(n) - curve.at(n), 0.0) / beyond for n in (1, tokens))
    per_token = max(some - one, 0.0) / (tokens - 1)
    return ContextCost(per_sequence=max(one - per_token, 0.0), per_token=per_token)
