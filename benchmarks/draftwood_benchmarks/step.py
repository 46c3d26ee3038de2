"""`draftwood bench step`: the time of one forward pass by its number of tokens, which is the price of draft tokens.

The critical decoding length is the number of tokens at which a step first takes more than 1.2 times as long as a step
of one token. Below it draft tokens are nearly free on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from draftwood_benchmarks.harness.models import ModelOptions, choose_model, describe
from draftwood_benchmarks.harness.report import OtherLoad, OutputOptions, Rows, console, progress, table, warning
from draftwood_client.cli.options import command
from draftwood_strategies.draft_engine.step_times import StepTimeCurve

if TYPE_CHECKING:
    from draftwood_model_runner.loading.model import LoadedModel

CRITICAL_RATIO = 1.2
"""A convention, not tuned: it defines the figure that is reported."""
_CURVE_ROUNDS = 10
"""The curve takes the fastest of these rounds at each size, so that a burst of other load does not bend it."""


@command
def step(
    model: ModelOptions,
    output: OutputOptions,
    largest: Annotated[int, typer.Option(min=2, help="Largest number of tokens in the step.")] = 256,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the KV cache that the step attends to.")] = 128,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Time to measure the curve; the fastest run of each size counts.")
    ] = 10.0,
) -> None:
    """The step-time curve: one forward pass over n tokens compared with one over a single token, and the critical
    decoding length, at which it first takes more than 1.2 times as long.
    """
    chosen, load = choose_model(model), OtherLoad()
    with console.status("Loading the model"):
        loaded = chosen.load()
    curve = _measure(loaded, context, largest, seconds, model.threads)
    rows, critical, busy = rows_of(curve), critical_length(curve), load.share()
    title = describe(chosen, loaded) + warning(busy)
    columns = {"tokens": "{tokens}", "ms": "{ms:.2f}", "x one token": "{ratio:.2f}"}
    reached = f"{int(curve.sizes[-1])} tokens take less" if critical is None else f"{critical} tokens"
    caption = (
        f"Critical decoding length, where T(n) first exceeds {CRITICAL_RATIO:g} T(1): {reached}. Each time is the"
        f" fastest of up to {_CURVE_ROUNDS} rounds, then smoothed: no time is below that of fewer tokens, and no time"
        " per token above it. A plateau may come of that."
    )
    output.report(
        table(f"One forward pass\n{title}", rows, columns, caption=caption),
        rows,
        model=title,
        vocabulary=loaded.vocab_size,
        context=min(context, loaded.max_context // 2),
        critical_length=critical,
        busy=busy,
    )


def _measure(model: LoadedModel, context: int, largest: int, seconds: float, threads: int | None) -> StepTimeCurve:
    """The engine's own measurement, repeated, so that a burst of other load bends nothing."""
    import torch

    from draftwood_model_runner.step_measuring import measure_curve

    runner = model.factory.runner(kv_tokens=context + 2 * largest, threads=threads or torch.get_num_threads())
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
