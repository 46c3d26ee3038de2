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

from draftwood_benchmarks.harness.machine import OtherLoad, warning
from draftwood_benchmarks.harness.models import ModelOptions, chosen_model, describe, synchronize
from draftwood_benchmarks.harness.prompts import SAMPLED, random_prompts
from draftwood_benchmarks.harness.report import PictureOptions, console, progress, table
from draftwood_client.cli.options import command
from draftwood_strategies.budgeting.step_time import StepTimeCurve

if TYPE_CHECKING:
    from rich.console import Console

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
    batch: Annotated[
        int, typer.Option(min=0, help="Also measure a step of this many sequences with drafting off; 0 leaves it out.")
    ] = 8,
    sampled: Annotated[
        bool,
        typer.Option("--sampled", help="Also measure these steps with temperature 0.6, top-k 20, top-p 0.95."),
    ] = False,
) -> None:
    """The step-time curve: one forward pass over n tokens compared with one over a single token, and the critical
    decoding length, at which it first takes more than 1.2 times as long.
    """
    out = console()
    output.check()
    load = OtherLoad()
    needs_more = model.model is None and 2 * context > _BUNDLED_POSITIONS
    with chosen_model(model, out, 2 * context if needs_more else None) as chosen:
        from draftwood_model_runner.engine import Engine, EngineConfig

        with out.status("Loading the model"):
            loaded = chosen.load()
            config = EngineConfig(adaptive_budget=False, max_running=max(batch, 8), threads=model.threads)
            full = loaded.max_context + config.max_draft_nodes
            engine = Engine(loaded, replace(config, kv_cache_tokens=full + config.max_running * _BATCH_TOKENS))
        curve = _measure(loaded, context, largest, seconds, out)
        together = batch_cost(engine, batch, out, sampled=sampled) if batch else None
    rows = rows_of(curve)
    critical = critical_length(curve)
    busy = load.share()
    title = describe(chosen, loaded) + warning(busy)
    columns = {"tokens": "{tokens}", "ms": "{ms:.2f}", "x one token": "{ratio:.2f}"}
    out.print(table(f"One forward pass\n{title}", rows, columns))
    sizes = f"{int(curve.sizes[-1])} tokens take less" if critical is None else f"{critical} tokens"
    out.print(f"Critical decoding length, where T(n) first exceeds {CRITICAL_RATIO:g} T(1): {sizes}.")
    out.print(
        f"Each time is the fastest of up to {_CURVE_ROUNDS} rounds, then smoothed: no time is below that of fewer"
        " tokens, and no time per token above it. A plateau may come of that."
    )
    if together is not None:
        _print_batch(together, out)
    output.draw(lambda axes: _draw(rows, critical, title, axes))
    output.write(
        rows,
        model=title,
        vocabulary=loaded.vocab_size,
        context=min(context, loaded.max_context // 2),
        critical_length=critical,
        batch=together,
        other_load=busy,
    )


def _print_batch(together: dict[str, float], out: Console) -> None:
    out.print(
        f"A step of {together['sequences']} sequences with drafting off: {together['ms']:.2f} ms,"
        f" {together['ratio']:.2f} times that of one ({together['ms_of_one']:.2f} ms)."
    )
    if "sampled_ms" in together:
        out.print(
            f"Sampled: {together['sampled_ms']:.2f} ms, and {together['sampled_ms_of_one']:.2f} ms of one. Speed of"
            f" sampled against greedy steps: {together['sampled_vs_greedy']:.3f}, and"
            f" {together['sampled_vs_greedy_of_one']:.3f} of one."
        )


def _measure(model: LoadedModel, context: int, largest: int, seconds: float, out: Console) -> StepTimeCurve:
    """The engine's own measurement, repeated, so that a burst of other load bends nothing."""
    import torch

    from draftwood_model_runner.drafting.step_measuring import measure_curve

    threads = torch.get_num_threads()
    runner = model.factory.runner(kv_tokens=context + 2 * largest, threads=threads)
    best: dict[int, float] = {}
    for _ in progress(range(_CURVE_ROUNDS), "steps of one sequence", out):
        curve = measure_curve(runner, model.max_context, largest, limit=seconds / _CURVE_ROUNDS, context=context)
        for size, one in zip(curve.sizes.tolist(), curve.seconds.tolist(), strict=True):
            best[int(size)] = min(one, best.get(int(size), one))
    return StepTimeCurve(best)


def rows_of(curve: StepTimeCurve) -> list[dict[str, float]]:
    """The curve at its measured sizes: tokens, milliseconds, ratio to a single token."""
    one = float(curve(1))
    return [
        {"tokens": int(size), "ms": round(1000 * seconds, 4), "ratio": round(seconds / one, 4)}
        for size, seconds in zip(curve.sizes.tolist(), curve.seconds.tolist(), strict=True)
    ]


def critical_length(curve: StepTimeCurve) -> int | None:
    """The least number of tokens with T(n) > `CRITICAL_RATIO` T(1); None if no measured size reaches it."""
    sizes = np.arange(1, int(curve.sizes[-1]) + 1)
    beyond = np.flatnonzero(curve(sizes) > CRITICAL_RATIO * curve(1))
    return int(sizes[beyond[0]]) if beyond.size else None


def batch_cost(engine: Engine, batch: int, out: Console, *, sampled: bool = False) -> dict[str, float]:
    """Milliseconds of an engine step of `batch` decoding sequences and of one, drafting off, measured alternately;
    where `sampled`, also with sampling, and the speed relative to that without."""
    cases = [(count, sampling) for sampling in ((False, True) if sampled else (False,)) for count in (batch, 1)]
    seconds: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
    for round_ in progress(range(_BATCH_ROUNDS), "steps of several sequences", out):
        for count, sampling in cases:
            seconds[count, sampling].append(_step_seconds(engine, count, round_, sampled=sampling))
    best = {case: 1000 * min(found) for case, found in seconds.items()}
    many, one = best[batch, False], best[1, False]
    cost = {
        "sequences": batch,
        "ms": round(many, 4),
        "ms_of_one": round(one, 4),
        "ratio": round(many / one, 4),
    }
    if sampled:
        cost["sampled_ms"], cost["sampled_ms_of_one"] = (round(best[count, True], 4) for count in (batch, 1))
        cost["sampled_vs_greedy"] = round(many / best[batch, True], 4)
        cost["sampled_vs_greedy_of_one"] = round(one / best[1, True], 4)
    return cost


def _step_seconds(engine: Engine, count: int, seed: int, *, sampled: bool) -> float:
    """The median step of `count` sequences that are past their prompts."""
    from draftwood_model_runner.request import Request, SamplingParams, StopParams
    from draftwood_model_runner.sequence import Sequence

    prompts = random_prompts(count, _BATCH_PROMPT_TOKENS, engine.model.vocab_size)
    stop = StopParams(max_tokens=_BATCH_STEPS + count + 2, ignore_eos=True)
    sampling = SamplingParams(**SAMPLED) if sampled else SamplingParams()
    sequences = [
        Sequence(Request(request_id=f"{seed}-{i}", prompt=prompt, stop=stop, sampling=sampling))
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while not all(sequence.output for sequence in sequences):
        engine.step()
    seconds = []
    for _ in range(_BATCH_STEPS):
        synchronize(engine.model)
        started = time.perf_counter()
        engine.step()
        synchronize(engine.model)
        seconds.append(time.perf_counter() - started)
    for sequence in sequences:
        engine.cancel(sequence)
    return statistics.median(seconds)


def _draw(rows: list[dict[str, float]], critical: int | None, title: str, axes: Any) -> None:
    axes.plot([row["tokens"] for row in rows], [row["ms"] for row in rows], marker=".")
    axes.axhline(CRITICAL_RATIO * rows[0]["ms"], color="grey", linewidth=0.8, linestyle="--")
    if critical is not None:
        axes.axvline(critical, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(f" critical length {critical}", (critical, rows[-1]["ms"]), fontsize=8, va="top")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the step")
    axes.set_ylabel("milliseconds")
    axes.set_title(title, fontsize=9)
