"""Host time of decoding steps on a model that costs nothing."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftwood_benchmarks.harness.report import BenchmarkError
from draftwood_benchmarks.overhead.costless import MAX_CONTEXT, CostlessRunner, costless_model, make_texts
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.registry import create

PROMPT_TOKENS = 64
LEARNED, ANSWER_TOKENS = 200, 200
"""Answers in the tenant's memory at first, and their tokens."""
_WARM_STEPS = 100
"""Steps of a round before those that are measured."""


@dataclass(frozen=True, slots=True)
class Row:
    """Of the measured decoding steps.

    Attributes:
        host_us: microseconds of host time for each sequence and step, the median over the steps.
        acceptance_length: tokens that a sequence writes in a step, on average.
    """

    strategy: str
    streams: int
    host_us: float
    acceptance_length: float


def measured(
    strategy_name: str,
    streams: int,
    nodes: int,
    steps: int,
    prompt_tokens: int = PROMPT_TOKENS,
    learned: int = LEARNED,
) -> Row:
    """One round: `streams` sequences of one tenant, all decoding.

    Args:
        prompt_tokens: of each.
        learned: answers in the tenant's memory at first.

    Raises:
        BenchmarkError: drafting was switched off.
    """
    texts = make_texts(streams, prompt_tokens + MAX_CONTEXT, seed=1)
    texts[:, 0] = np.arange(streams) + 100
    runner = CostlessRunner(texts)
    engine = Engine(costless_model(runner), EngineConfig(max_running=streams, max_draft_nodes=nodes))
    strategy = learned_strategy(strategy_name, learned)
    sequences = [
        Sequence(
            Request(
                request_id=str(number),
                prompt=text[:prompt_tokens].copy(),
                stop=StopParams(MAX_CONTEXT - PROMPT_TOKENS),
                strategy_name=strategy_name,
                max_draft_nodes=nodes,
            ),
            strategy,
        )
        for number, text in enumerate(texts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while any(not sequence.output for sequence in sequences):
        engine.step()
    for _ in range(_WARM_STEPS):
        engine.step()
    written = -sum(len(sequence.output) for sequence in sequences)
    seconds = _host_seconds(engine, runner, steps, streams)
    written += sum(len(sequence.output) for sequence in sequences)
    if reasons := {sequence.stats.drafting_disabled_reason for sequence in sequences} - {""}:
        raise BenchmarkError(f"{strategy_name}: drafting was switched off: {min(reasons)}")
    engine.close()
    return Row(
        strategy_name,
        streams,
        round(1e6 * statistics.median(seconds) / streams, 2),
        round(written / steps / streams, 3),
    )


def _host_seconds(engine: Engine, runner: CostlessRunner, steps: int, streams: int) -> list[float]:
    """Of each step what the host took. Raises BenchmarkError: a sequence ended before the last one."""
    seconds = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(steps):
            spent, began = runner.seconds, time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - began - (runner.seconds - spent))
            if engine.running < streams:
                raise BenchmarkError("a sequence ended before the last measured step; measure fewer steps")
    finally:
        gc.enable()
        gc.unfreeze()
    return seconds


def learned_strategy(name: str, learned: int) -> Any:
    """A strategy that has learned so many answers."""
    strategy: Any = create(name)
    if name != "none":
        for text in make_texts(learned, ANSWER_TOKENS, seed=2):
            strategy.learn(text)
    return strategy
