"""`draftwood experiment replay`: strategies compared over recorded answers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from draftwood_benchmarks.harness.report import BenchmarkError, console, progress
from draftwood_benchmarks.replay.paired import ArmSpec, PairedRow, paired, steps_of
from draftwood_benchmarks.replay.trace import TRACES_HELP, Recording, TraceError, read_trace
from draftwood_client.cli.apps import new_app, run
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import DraftwoodError, InvalidInputError, InvalidValueError
from draftwood_strategies.registry import UnknownStrategyError

NEEDS_MODEL = "reads the model's most probable tokens, which recordings lack; here it drafts from token ids alone"


app = new_app(no_args_is_help=True)


def replay(args: list[str]) -> int:
    """The command `draftwood experiment replay`. Returns the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return run(app, args, "experiment replay", {InvalidValueError: 2, DraftwoodError: 1})


@app.command()
@command
def _replay(
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
) -> None:
    """Tokens per step of several strategies over the same recorded answers, compared answer by answer."""
    specs = read_arms(arm)
    needs_model = [spec.name for spec in specs if _checked(spec).top_k]
    recordings = _read(files, limit)
    out = console()
    tokens = np.array([output.size - 1 for _, output in recordings], np.int64)
    if not tokens.sum():
        raise BenchmarkError("no recorded output has a second token, so there is no step to compare")
    shown = specs if as_json else progress(specs, "replaying", out)
    rows = paired(specs, [steps_of(spec, recordings, budget) for spec in shown], tokens)
    if as_json:
        print(
            json.dumps(
                {"rows": [asdict(row) for row in rows], "budget": budget, "without_model": needs_model}, indent=1
            )
        )
        return
    out.print(_table(rows, budget))
    for name in needs_model:
        out.print(f"{name} {NEEDS_MODEL}.")


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


def _checked(spec: ArmSpec) -> Any:
    try:
        return spec.create()
    except (UnknownStrategyError, TypeError, ValueError) as error:
        raise InvalidInputError("--arm", spec.name, str(error)) from error


def _read(files: list[Path], limit: int | None) -> list[Recording]:
    try:
        return [recording for path in files for recording in read_trace(path, limit)]
    except TraceError as error:
        raise InvalidInputError("FILE", None, str(error)) from error


def _table(rows: list[PairedRow], budget: int) -> Table:
    title = f"{rows[0].answers:,} recorded answers, {rows[0].tokens:,} tokens, {budget} draft nodes a step"
    table = Table(title=title, title_justify="left")
    for heading in ("arm", "strategy", "steps", "tokens/step", "change", "95% interval"):
        table.add_column(heading, justify="left" if heading in ("arm", "strategy") else "right")
    for row in rows:
        change = "-" if row.change is None else f"{row.change:+.1%}"
        span = "-" if row.low is None or row.high is None else f"{row.low:+.1%} to {row.high:+.1%}"
        table.add_row(row.arm, row.strategy, f"{row.steps:,}", f"{row.acceptance_length:.3f}", change, span)
    return table
