"""Host time of the engine's steps on a model that costs nothing."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from draftwood_benchmarks.harness.answers import Task, sequences
from draftwood_benchmarks.harness.report import BenchmarkError
from draftwood_benchmarks.overhead.costless import MAX_CONTEXT, CostlessRunner, costless_model, make_texts
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_strategies.registry import create

PROMPT_TOKENS = 64
LEARNED, ANSWER_TOKENS = 200, 200
"""Answers in the tenant's memory at first, and their tokens."""
_WARM_STEPS, _STEPS = 100, 150
"""Steps of a round: before those that are measured, and these."""


def host_row(grows_with: str, size: int, what: str, host_us: float) -> dict[str, Any]:
    """A row of the report: microseconds of one sequence that `what` took, the best of the rounds, with so many streams
    or tokens ("vocabulary", "context", "prompt" or "memory")."""
    return {"grows_with": grows_with, "size": size, "what": what, "host_us": host_us}


def step_us(
    strategy_name: str, streams: int, nodes: int, prompt_tokens: int = PROMPT_TOKENS, learned: int = LEARNED
) -> float:
    """Microseconds of host time for each sequence and step, the median over the steps of one round: `streams` sequences
    of one tenant, all decoding.

    Args:
        nodes: draft nodes of a sequence, at most.
        prompt_tokens: of each.
        learned: answers in the tenant's memory at first.

    Raises:
        BenchmarkError: drafting was switched off.
    """
    texts = make_texts(streams, prompt_tokens + MAX_CONTEXT, seed=1)
    texts[:, 0] = np.arange(streams) + 100
    runner = CostlessRunner(texts)
    engine = Engine(costless_model(runner), EngineConfig(max_running=streams, max_draft_nodes=nodes))
    prompts, task = [text[:prompt_tokens].copy() for text in texts], Task(MAX_CONTEXT - PROMPT_TOKENS)
    strategy = _learned_strategy(strategy_name, learned)
    running = sequences(prompts, task, strategy, strategy_name=strategy_name, max_draft_nodes=nodes)
    for sequence in running:
        engine.add(sequence)
    while any(not sequence.output for sequence in running):
        engine.step()
    for _ in range(_WARM_STEPS):
        engine.step()
    with collector_off():
        seconds = [_timed_step(engine, runner) for _ in range(_STEPS)]
    assert engine.running == streams, "a sequence ended before the last measured step"
    if reasons := {sequence.stats.drafting_disabled_reason for sequence in running} - {""}:
        raise BenchmarkError(f"{strategy_name}: drafting was switched off: {min(reasons)}")
    engine.close()
    return round(1e6 * statistics.median(seconds) / streams, 2)


def prompt_us(strategy_name: str, tokens: int) -> tuple[float, float]:
    """Microseconds of host time until a prompt has its first token: over all steps, and of the longest one."""
    text = make_texts(1, tokens + MAX_CONTEXT, seed=3)
    runner = CostlessRunner(text)
    engine = Engine(costless_model(runner), EngineConfig(max_running=1))
    strategy = _learned_strategy(strategy_name, LEARNED)
    [sequence] = sequences([text[0, :tokens].copy()], Task(8), strategy, strategy_name=strategy_name)
    engine.add(sequence)
    seconds = []
    while not sequence.output:
        seconds.append(_timed_step(engine, runner))
    engine.close()
    return round(1e6 * sum(seconds), 1), round(1e6 * max(seconds), 1)


def _timed_step(engine: Engine, runner: CostlessRunner) -> float:
    """Seconds of host time."""
    spent, began = runner.seconds, time.perf_counter()
    engine.step()
    return time.perf_counter() - began - (runner.seconds - spent)


@contextmanager
def collector_off() -> Iterator[None]:
    """A collection that scans all libraries takes longer than what is timed."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _learned_strategy(name: str, learned: int) -> Any:
    """A strategy that has learned so many answers."""
    strategy: Any = create(name)
    if name != "none":
        for text in make_texts(learned, ANSWER_TOKENS, seed=2):
            strategy.learn(text)
    return strategy
