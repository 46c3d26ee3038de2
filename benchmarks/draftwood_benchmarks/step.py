"""`draftwood bench step`: the time of one forward pass by its number of tokens, which is the price of draft tokens.

The critical decoding length is the number of tokens at which a step first takes more than 1.2 times as long as a step
of one token. Below it draft tokens are nearly free on this machine.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from draftwood_benchmarks.harness.models import ModelOptions, chosen_model, describe, synchronize
from draftwood_benchmarks.harness.prompts import SAMPLED, SampledOption, random_prompts
from draftwood_benchmarks.harness.report import OtherLoad, PictureOptions, Rows, console, progress, table, warning
from draftwood_client.cli.options import command
from draftwood_strategies.draft_engine.step_times import StepTimeCurve

if TYPE_CHECKING:
    from draftwood_model_runner.engine import Engine
    from draftwood_model_runner.loading.model import LoadedModel

CRITICAL_RATIO = 1.2
"""A convention, not tuned: it defines the figure that is reported."""
_CURVE_ROUNDS = 10
"""The curve takes the fastest of these rounds at each size, so that a burst of other load does not bend it."""
_BUNDLED_POSITIONS = 2048
_BATCH_PROMPT_TOKENS = 64
_BATCH_STEPS = 12
"""Engine steps per round; the median counts."""
_BATCH_TOKENS = 256
"""Room of each sequence in KV memory."""
_BATCH_ROUNDS = 6
"""Rounds of the batched step; the fastest counts."""


@command
def step(
    model: ModelOptions,
    output: PictureOptions,
    largest: Annotated[int, typer.Option(min=2, help="Largest number of tokens in the step.")] = 256,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the KV cache that the step attends to.")] = 128,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Time to measure the curve; the fastest run of each size counts.")
    ] = 10.0,
    batch: Annotated[int, typer.Option(min=1, help="Also measure a step of so many sequences with drafting off.")] = 8,
    sampled: SampledOption = False,
) -> None:
    """The step-time curve: one forward pass over n tokens compared with one over a single token, and the critical
    decoding length, at which it first takes more than 1.2 times as long. With --sampled the steps of several sequences
    are measured with sampling too.
    """
    load = OtherLoad()
    with chosen_model(model, 2 * context if 2 * context > _BUNDLED_POSITIONS else None) as chosen:
        from draftwood_model_runner.engine import Engine, EngineConfig

        with console.status("Loading the model"):
            loaded = chosen.load()
            config = EngineConfig(adaptive_budget=False, max_running=max(batch, 8), threads=model.threads)
            full = loaded.max_context + config.max_draft_nodes
            engine = Engine(loaded, replace(config, kv_cache_tokens=full + config.max_running * _BATCH_TOKENS))
        curve = _measure(loaded, context, largest, seconds)
        together = batch_cost(engine, batch, sampled=sampled)
    rows, critical, busy = rows_of(curve), critical_length(curve), load.share()
    title = describe(chosen, loaded) + warning(busy)
    columns = {"tokens": "{tokens}", "ms": "{ms:.2f}", "x one token": "{ratio:.2f}"}
    output.report(
        table(f"One forward pass\n{title}", rows, columns),
        rows,
        model=title,
        vocabulary=loaded.vocab_size,
        context=min(context, loaded.max_context // 2),
        critical_length=critical,
        batch=together,
        other_load=busy,
    )
    sizes = f"{int(curve.sizes[-1])} tokens take less" if critical is None else f"{critical} tokens"
    console.print(f"Critical decoding length, where T(n) first exceeds {CRITICAL_RATIO:g} T(1): {sizes}.")
    console.print(
        f"Each time is the fastest of up to {_CURVE_ROUNDS} rounds, then smoothed: no time is below that of fewer"
        " tokens, and no time per token above it. A plateau may come of that."
    )
    console.print(
        f"A step of {batch} sequences with drafting off: {together['ms']:.2f} ms,"
        f" {together['ratio']:.2f} times that of one ({together['ms_of_one']:.2f} ms)."
    )
    if sampled:
        console.print(
            f"Sampled: {together['sampled_ms']:.2f} ms, and {together['sampled_ms_of_one']:.2f} ms of one. Speed of"
            f" sampled against greedy steps: {together['sampled_vs_greedy']:.3f}, and"
            f" {together['sampled_vs_greedy_of_one']:.3f} of one."
        )
    output.draw(lambda axes: _draw(rows, critical, title, axes))


def _measure(model: LoadedModel, context: int, largest: int, seconds: float) -> StepTimeCurve:
    """The engine's own measurement, repeated, so that a burst of other load bends nothing."""
    import torch

    from draftwood_model_runner.step_measuring import measure_curve

    runner = model.factory.runner(kv_tokens=context + 2 * largest, threads=torch.get_num_threads())
    best: dict[int, float] = {}
    for _ in progress(range(_CURVE_ROUNDS), "steps of one sequence"):
        curve = measure_curve(runner, model.max_context, largest, limit=seconds / _CURVE_ROUNDS, context=context)
        for size, took in zip(curve.sizes.tolist(), curve.seconds.tolist(), strict=True):
            best[int(size)] = min(took, best.get(int(size), took))
    return StepTimeCurve(best)


def rows_of(curve: StepTimeCurve) -> Rows:
    """The curve at its measured sizes: tokens, milliseconds, ratio to a single token."""
    of_one = float(curve(1))
    return [
        {"tokens": int(size), "ms": round(1000 * seconds, 4), "ratio": round(seconds / of_one, 4)}
        for size, seconds in zip(curve.sizes.tolist(), curve.seconds.tolist(), strict=True)
    ]


def critical_length(curve: StepTimeCurve) -> int | None:
    """The least number of tokens with T(n) > `CRITICAL_RATIO` T(1); None if no measured size reaches it."""
    sizes = np.arange(1, int(curve.sizes[-1]) + 1)
    beyond = np.flatnonzero(curve(sizes) > CRITICAL_RATIO * curve(1))
    return int(sizes[beyond[0]]) if beyond.size else None


def batch_cost(engine: Engine, batch: int, *, sampled: bool = False) -> dict[str, float]:
    """Milliseconds of an engine step of `batch` decoding sequences and of one, drafting off, measured alternately;
    where `sampled`, also with sampling, and the speed relative to that without."""
    cases = [(count, sampling) for sampling in ((False, True) if sampled else (False,)) for count in (batch, 1)]
    seconds: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
    for _ in progress(range(_BATCH_ROUNDS), "steps of several sequences"):
        for case in cases:
            seconds[case].append(_step_seconds(engine, *case))
    best = {case: 1000 * min(of_case) for case, of_case in seconds.items()}
    many, single = best[batch, False], best[1, False]
    cost = {"sequences": batch, "ms": many, "ms_of_one": single, "ratio": many / single}
    if sampled:
        cost["sampled_ms"], cost["sampled_ms_of_one"] = best[batch, True], best[1, True]
        cost["sampled_vs_greedy"], cost["sampled_vs_greedy_of_one"] = many / best[batch, True], single / best[1, True]
    return {name: round(value, 4) for name, value in cost.items()}


def _step_seconds(engine: Engine, count: int, sampled: bool) -> float:
    """The median step of `count` sequences that are past their prompts."""
    from draftwood_benchmarks.harness.answers import Task, sequences

    prompts = random_prompts(count, _BATCH_PROMPT_TOKENS, engine.model.vocab_size)
    running = sequences(prompts, Task(_BATCH_STEPS + count + 2, ignore_eos=True, **(SAMPLED if sampled else {})))
    for sequence in running:
        engine.add(sequence)
    while not all(sequence.output for sequence in running):
        engine.step()
    seconds = []
    for _ in range(_BATCH_STEPS):
        synchronize(engine.model)
        started = time.perf_counter()
        engine.step()
        synchronize(engine.model)
        seconds.append(time.perf_counter() - started)
    for sequence in running:
        engine.cancel(sequence)
    return statistics.median(seconds)


def _draw(rows: Rows, critical: int | None, title: str, axes: Any) -> None:
    axes.plot([row["tokens"] for row in rows], [row["ms"] for row in rows], marker=".")
    axes.axhline(CRITICAL_RATIO * rows[0]["ms"], color="grey", linewidth=0.8, linestyle="--")
    if critical is not None:
        axes.axvline(critical, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(f" critical length {critical}", (critical, rows[-1]["ms"]), fontsize=8, va="top")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="tokens in the step", ylabel="milliseconds")
    axes.set_title(title, fontsize=9)
