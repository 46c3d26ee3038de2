"""`draftwood experiment replay`: strategies compared over recorded answers, without noise from assignment.

Every arm writes the same tokens, so arms differ in the number of steps alone, and in what the levels of a model's
drafts take. The differences are paired by answer, and their interval comes from resampling answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from draftwood_benchmarks.harness.models import ModelOptions, chosen_model
from draftwood_benchmarks.harness.report import BenchmarkError, Rows, console, progress, table
from draftwood_benchmarks.replay import TRACES_HELP, Recording, Replayed, created, read_trace
from draftwood_benchmarks.replay import replay as replayed
from draftwood_client.cli.apps import new_app, run
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import DraftwoodError, InvalidInputError, InvalidValueError
from draftwood_strategies import Strategy

if TYPE_CHECKING:
    from draftwood_benchmarks.replay.beside_model import ModelReplay

NEEDS_MODEL = "reads the model's most probable tokens, which recordings lack; here it drafts from token ids alone"
RESAMPLES = 4000
_AT_ONCE = 200
"""Resamples that are drawn at once; affects memory only."""
app = new_app(no_args_is_help=True)


class ArmSpec(NamedTuple):
    """An arm: its name, its strategy, and the strategy's options."""

    name: str
    strategy: str
    options: Mapping[str, object]

    def create(self) -> Strategy:
        """Raises InvalidInputError."""
        return created("--arm", self.strategy, self.options, self.name)


def replay(args: list[str]) -> int:
    """The command `draftwood experiment replay`. Returns the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return run(app, args, "experiment replay", {InvalidValueError: 2, DraftwoodError: 1})


@app.command()
@command
def _replay(
    options: ModelOptions,
    files: Annotated[list[Path], typer.Argument(help=TRACES_HELP)],
    arm: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:STRATEGY[,OPTION=VALUE]...", help="An arm; give two or more, the first is the control."
        ),
    ],
    budget: Annotated[int, typer.Option(min=1, help="Draft nodes per step.")] = 16,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    level_share: Annotated[
        float, typer.Option(min=0, max=10, help="What a level of a model's draft takes, as a share of a step.")
    ] = 0.1,
) -> None:
    """Tokens per step of several strategies over the same recorded answers, compared answer by answer. Arms with the
    strategies head and draft_model need --model, which wrote the answers.
    """
    recordings = [recording for path in files for recording in read_trace(path, limit)]
    specs = read_arms(arm)
    with ExitStack() as stack:
        replaying: Callable[[Strategy, Sequence[Recording]], Replayed] = partial(replayed, budget=budget)
        if beside := options.model is not None:
            beside_model = _beside_model(options, budget)
            stack.enter_context(beside_model.strategies(level_share))
            replaying = beside_model.replay
        needs_model = [spec.name for spec in specs if spec.create().top_k and not beside]
        tokens = np.array([output.size - 1 for _, output in recordings], np.int64)
        if not tokens.sum():
            raise BenchmarkError("no recorded output has a second token, so there is no step to compare")
        shown = specs if as_json else progress(specs, "replaying")
        rows = paired(specs, [steps_of(spec, recordings, replaying) for spec in shown], tokens, level_share)
    if as_json:
        figures = {"rows": rows, "budget": budget, "level_share": level_share, "without_model": needs_model}
        print(json.dumps(figures, indent=1))
        return
    title = f"{rows[0]['answers']:,} recorded answers, {rows[0]['tokens']:,} tokens, {budget} draft nodes a step"
    spans = [None if row["low"] is None else f"{row['low']:+.1%} to {row['high']:+.1%}" for row in rows]
    shown_rows = [row | {"span": span} for row, span in zip(rows, spans, strict=True)]
    columns = {"arm": "{arm}", "strategy": "{strategy}", "steps": "{steps:,}", "tokens/step": "{acceptance_length:.3f}"}
    columns |= {"levels/step": "{levels:.2f}", "speed": "{speed:.3f}"} if beside else {}
    columns |= {"change": "{change:+.1%}", "95% interval": "{span}"}
    speed = f"speed: tokens in the time of a step, if a level of a model's draft takes {level_share:g} of one"
    console.print(table(title, shown_rows, columns, texts=2, caption=speed if beside else ""))
    for name in needs_model:
        console.print(f"{name} {NEEDS_MODEL}.")


def _beside_model(options: ModelOptions, budget: int) -> ModelReplay:
    with chosen_model(options) as chosen:
        from draftwood_benchmarks.replay.beside_model import ModelReplay

        with console.status("Loading the model"):
            return ModelReplay(chosen.load(), budget)


def read_arms(texts: list[str]) -> list[ArmSpec]:
    """The arms of `--arm`. Raises InvalidInputError."""
    specs = [_read_arm(text) for text in texts]
    names = [spec.name for spec in specs]
    if len(specs) < 2:
        raise InvalidInputError("--arm", None, "two or more arms are needed, the first being the control")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInputError("--arm", twice, "two arms have this name")
    return specs


def _read_arm(text: str) -> ArmSpec:
    name, _, rest = text.partition(":")
    strategy, *settings = rest.split(",")
    options = dict(setting.split("=", 1) for setting in settings if "=" in setting)
    if not name or not strategy or len(options) != len(settings):
        raise InvalidInputError("--arm", text, "it must be NAME:STRATEGY[,OPTION=VALUE]..., each option once")
    return ArmSpec(name, strategy, {key: _value(value) for key, value in options.items()})


def _value(text: str) -> Any:
    """A number, true or false, as in JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def steps_of(
    spec: ArmSpec, recordings: Sequence[Recording], replaying: Callable[[Strategy, Sequence[Recording]], Replayed]
) -> NDArray[np.int64]:
    """int64[answer, 2]: steps of each answer and levels of its drafts; the memory starts empty and learns from each."""
    strategy = spec.create()
    answers = [replaying(strategy, [recording]) for recording in recordings]
    return np.array([(answer.steps, answer.levels) for answer in answers], np.int64)


def paired(
    specs: Sequence[ArmSpec], steps: Sequence[NDArray[np.int64]], tokens: NDArray[np.int64], level_share: float = 0.0
) -> Rows:
    """The rows of the arms. "answers" have at least one step; "speed" is tokens in the time of a step, "change" its
    relative change from the first arm's, 0.1 being 10% more tokens, "low" and "high" the 95% interval of that; None for
    the first arm.

    Args:
        specs: the arms, the first one being the control.
        steps: int64[answer, 2] of each arm, as of `steps_of`.
        tokens: int64[answer], tokens written in steps, which are the same in every arm.
        level_share: what a level takes, as a share of a step.
    """
    rows: Rows = []
    times = [of_arm @ np.array([1.0, level_share]) for of_arm in steps]
    for spec, of_arm, taken in zip(specs, steps, times, strict=True):
        (count, levels), written = of_arm.sum(0).tolist(), int(tokens.sum())
        change, low, high = None, None, None
        if rows:
            change, (low, high) = float(times[0].sum() / taken.sum() - 1.0), interval(times[0], taken)
        row = {"arm": spec.name, "strategy": spec.strategy, "answers": int((tokens > 0).sum()), "tokens": written}
        row |= {"steps": count, "acceptance_length": written / count, "levels": levels / count}
        row |= {"speed": written / float(taken.sum()), "change": change, "low": low, "high": high}
        rows.append(row)
    return rows


def interval(control: NDArray[Any], treatment: NDArray[Any], seed: int = 0) -> tuple[float, float]:
    """95% percentile-bootstrap interval of the relative change of the tokens in a given time.

    Args:
        control, treatment: time of the same answers in steps, [answer]; those without a step say nothing.
        seed: of the resampling.
    """
    random = np.random.default_rng(seed)
    both = np.stack([control, treatment], axis=1)
    both = both[both[:, 0] > 0]
    changes = []
    for _ in range(RESAMPLES // _AT_ONCE):
        times_drawn = random.multinomial(len(both), np.full(len(both), 1.0 / len(both)), size=_AT_ONCE)
        sums = times_drawn @ both
        changes.append(sums[:, 0] / sums[:, 1] - 1.0)
    low, high = np.percentile(np.concatenate(changes), [2.5, 97.5])
    return float(low), float(high)
