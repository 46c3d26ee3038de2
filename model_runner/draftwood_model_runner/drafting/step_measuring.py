"""Measures what steps cost on this machine, with the model itself on made-up tokens. No torch."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from draftwood_model_runner.runners.base import Runner
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_strategies.budgeting.step_time import MEASURED_CONTEXT, ContextCost, StepTimeCurve, StepTimes, measure
from draftwood_strategies.draft import EMPTY_TREE

_SEVERAL = 4
"""Sequences of the step that shows what each further one adds."""
_LONG_CONTEXT, _SOME_TOKENS = 1024, 16
"""Context and tokens of the steps that show what longer contexts add."""


def measure_step_times(runner: Runner, max_context: int, largest: int) -> StepTimes:
    """What tokens cost, up to `largest` of one sequence, and what each further sequence and longer contexts add.

    Takes a second or two.
    """
    curve = measure_curve(runner, max_context, largest, limit=1.0)
    several = measure_curve(runner, max_context, 1, limit=0.1, sequences=_SEVERAL)
    per_sequence = max(several.at(1) - curve.at(_SEVERAL), 0.0) / (_SEVERAL - 1)
    return StepTimes(curve, per_sequence, _context_cost(runner, max_context, curve))


def measure_curve(
    runner: Runner,
    max_context: int,
    largest: int,
    *,
    limit: float,
    context: int = MEASURED_CONTEXT,
    sequences: int = 1,
) -> StepTimeCurve:
    """What a step costs by the number of tokens of each sequence.

    Args:
        max_context: of the model; `context` is cut to half of it, and `largest` to the rest.
        limit: seconds after which no further round of measurements begins.
        context: committed tokens of each sequence.
        sequences: how many share the step.
    """
    context = min(context, max_context // 2)
    largest = min(largest, max_context - context)
    needed = np.arange(-(-(context + largest) // runner.page_size), dtype=np.int32)
    # What is in the pages makes no difference, so that in a small memory sequences may have some in common.
    tables = [(needed + i * needed.size) % runner.pages for i in range(sequences)]

    def seconds(size: int) -> float:
        tokens = np.zeros(size, np.int32)
        laid_out = lay_out([BatchRow(pages, context, tokens, EMPTY_TREE, logits_from=0) for pages in tables])
        batch = replace(laid_out, made_up=True)
        started = time.perf_counter()
        runner.step(batch, 0)
        return time.perf_counter() - started

    return measure(seconds, largest, limit)


def _context_cost(runner: Runner, max_context: int, curve: StepTimeCurve) -> ContextCost:
    """What positions beyond the measured context add, from two sizes of step with a longer one."""
    beyond = min(_LONG_CONTEXT, max_context // 2) - MEASURED_CONTEXT
    tokens = min(_SOME_TOKENS, max_context // 2)
    if beyond < MEASURED_CONTEXT or tokens < 2:
        return ContextCost()
    long = measure_curve(runner, max_context, tokens, limit=0.1, context=MEASURED_CONTEXT + beyond)
    one, some = (max(long.at(n) - curve.at(n), 0.0) / beyond for n in (1, tokens))
    per_token = max(some - one, 0.0) / (tokens - 1)
    return ContextCost(per_sequence=max(one - per_token, 0.0), per_token=per_token)
