"""`draftwood bench overhead`: what the host works in a decoding step, for each sequence, by strategy.

The engine runs in this process on a model that costs nothing (`costless`), so that what is left is its own: schedule,
draft, verify, learn. With `--growth`, against vocabulary, context, prompt and memory; everything else stays the same.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from draftwood_benchmarks.costless import MAX_CONTEXT, CostlessRunner, costless_model, make_texts
from draftwood_benchmarks.harness.answers import Task, sequences
from draftwood_benchmarks.harness.report import (
    BenchmarkError,
    OtherLoad,
    PictureOptions,
    Rows,
    progress,
    table,
    warning,
)
from draftwood_benchmarks.load import read_levels
from draftwood_client.cli.options import command
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.sampling.most_probable import most_probable
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.registry import create, warm_up
from draftwood_strategies.threads import usable_cpus

STRATEGIES = ("none", "trie", "hybrid")
_STRATEGY = "hybrid"
"""Of `--growth`."""
_CONTEXTS = (512, 4_096, 16_384, 65_536)
_MEMORIES = (10_000, 100_000, 1_000_000)


@command
def overhead(
    output: PictureOptions,
    streams: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of sequences at once.")] = "1,32",
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Draft nodes of a sequence, at most.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="How often each case is measured; the best counts.")] = 3,
    growth: Annotated[
        bool, typer.Option("--growth", help="Measure what grows with vocabulary, context, prompt and memory.")
    ] = False,
) -> None:
    """Microseconds of a decoding step that the model does not take, for each sequence, by strategy."""
    levels = read_levels(streams)
    for strategy in STRATEGIES:  # compiled code is loaded at its first call
        warm_up(strategy)
        step_us(strategy, 2, nodes)
    load = OtherLoad()
    rows = _growth(nodes, rounds) if growth else _by_streams(levels, nodes, rounds)
    busy = load.share()
    shown = table_of(rows, f"Host time of a sequence, {nodes} draft nodes at most{warning(busy)}")
    output.report(shown, rows, nodes=nodes, busy=busy)
    output.draw(lambda axes: _draw(axes, rows))


def _by_streams(levels: Sequence[int], nodes: int, rounds: int) -> Rows:
    cases = [(strategy, count) for count in levels for strategy in STRATEGIES]
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for case in progress(cases * rounds, "rounds"):
        times[case].append(step_us(*case, nodes))
    return [host_row("streams", case[1], f"a warm step, {case[0]}", min(times[case])) for case in cases]


def _growth(nodes: int, rounds: int) -> Rows:
    """One quantity after the other."""
    rows, step = [*by_vocabulary(rounds)], f"a warm step, {_STRATEGY}"

    def best(context: int, learned: int) -> float:
        return min(step_us(_STRATEGY, 1, nodes, context, learned) for _ in range(rounds))

    for size in progress(_CONTEXTS, "context"):
        rows.append(host_row("context", size, step, best(size, LEARNED)))
    for size in progress(_CONTEXTS, "prompt"):
        totals, longest = zip(*(prompt_us(_STRATEGY, size) for _ in range(rounds)), strict=True)
        rows.append(host_row("prompt", size, "all steps of a prompt", min(totals)))
        rows.append(host_row("prompt", size, "the longest of them", min(longest)))
    for size in progress(_MEMORIES, "memory"):
        rows.append(host_row("memory", size, step, best(_CONTEXTS[0], size // ANSWER_TOKENS)))
    return rows


def table_of(rows: Rows, title: str) -> Table:
    columns = {"grows with": "{grows_with}", "timed": "{what}", "size": "{size:,}", "us": "{host_us:,.1f}"}
    return table(title, rows, columns, texts=2)


def _draw(axes: Any, rows: Rows) -> None:
    for case in dict.fromkeys((row["grows_with"], row["what"]) for row in rows):
        of_case = [row for row in rows if (row["grows_with"], row["what"]) == case]
        axes.plot([row["size"] for row in of_case], [row["host_us"] for row in of_case], "o-", label=": ".join(case))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(
        xlabel="streams, or tokens in the vocabulary, context, prompt or memory", ylabel="microseconds of host time"
    )
    axes.legend(fontsize=7)


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
    running = sequences(prompts, task, strategy, drafting=Drafting(strategy_name, max_nodes=nodes))
    for sequence in running:
        engine.add(sequence)
    while any(not sequence.output for sequence in running):
        engine.step()
    for _ in range(_WARM_STEPS):
        engine.step()
    gc.collect()
    gc.disable()  # a collection that scans all libraries takes longer than what is timed
    seconds = [_timed_step(engine, runner) for _ in range(_STEPS)]
    gc.enable()
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
    [sequence] = sequences([text[0, :tokens].copy()], Task(8), strategy, drafting=Drafting(strategy_name))
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


def _learned_strategy(name: str, learned: int) -> Any:
    """A strategy that has learned so many answers."""
    strategy: Any = create(name)
    if name != "none":
        for text in make_texts(learned, ANSWER_TOKENS, seed=2):
            strategy.learn(text)
    return strategy


VOCABULARIES = (4_096, 32_000, 151_936, 262_144)
OPTIONS = ((20, 0.95), (0, 0.95), (0, 1.0))
"""Pairs of top-k and top-p that are measured."""
_ROWS, _TOP = 49, 8
"""Of a step with 48 draft nodes whose most probable tokens a drafter learns from."""
_DEVIATION, _LIKELY, _ABOVE = 2.5, 30, 14.0
"""Made-up logits: normal, and a few likely tokens up to so much above them."""


def by_vocabulary(rounds: int) -> Iterator[dict[str, Any]]:
    """The median times of `TokenSampler.sample` at temperature 0.6, and of the 8 most probable tokens of 49 rows."""
    for vocabulary in VOCABULARIES:
        logits = _logits(vocabulary)
        for top_k, top_p in OPTIONS:
            [sequence] = sequences([np.arange(8, dtype=np.int32)], Task(100_000, 0.6, top_k, top_p))
            choose = partial(_choose, TokenSampler(sequence, frozenset(), vocabulary), cycle(logits))
            what = f"choosing a token, top-k {top_k or 'off'}, top-p {top_p:g}"
            yield host_row("vocabulary", vocabulary, what, _median_us(choose, 30 * rounds))
        find = partial(most_probable, logits, _TOP, usable_cpus())
        yield host_row("vocabulary", vocabulary, f"top {_TOP} of {_ROWS} rows", _median_us(find, 5 * rounds))


def _choose(sampler: TokenSampler, rows: Iterator[Any]) -> None:
    sampler.sample_and_accept(next(rows), [0])


def _logits(vocabulary: int) -> Any:
    """float32[row, vocab]."""
    random = np.random.default_rng(0)
    logits = (random.standard_normal((_ROWS, vocabulary)) * _DEVIATION).astype(np.float32)
    for row in logits:
        row[random.integers(0, vocabulary, _LIKELY)] += random.random(_LIKELY).astype(np.float32) * _ABOVE
    return logits


def _median_us(call: Callable[[], object], times: int) -> float:
    call()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return round(1e6 * float(np.median(seconds)), 1)
