"""Trains a small chat model on questions and answers: tokenizer, Llama weights and chat template, ready to be served.

    python tools/train_demo_model.py train support.jsonl --heldout heldout.jsonl --out model
    python tools/train_demo_model.py evaluate model heldout.jsonl

The command line alone: data are prepared in `tools.demo_model.corpus`, models trained in `tools.demo_model.training`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from model_runner.errors import InvalidValueError
from tools.demo_model.corpus import Exchange, encoded, read_exchanges, split, trained_tokenizer
from tools.demo_model.training import (
    CHECKPOINT,
    Evaluation,
    Recipe,
    Run,
    evaluate_on,
    new_run,
    restore,
    save_checkpoint,
    save_model,
    train_until,
)

CHECKPOINT_EVERY = 200

app = typer.Typer(
    help="Train and measure the kind of model that model_runner/loading/demo holds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
console = Console(soft_wrap=True)


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="JSONL with 'instruction' and 'response' in each line.")],
    out: Annotated[Path, typer.Option(help="Folder to write: the model, and the checkpoint while it is unfinished.")],
    heldout: Annotated[
        Path | None, typer.Option(help="JSONL of exchanges to measure on; they are left out of the training data.")
    ] = None,
    heldout_fraction: Annotated[
        float, typer.Option(help="Share of the data to hold out when there is no file.")
    ] = 0.02,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so long, with a checkpoint to --resume from.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in --out.")] = False,
    steps: Annotated[
        int, typer.Option(help="Steps of the whole run; the learning rate falls over them.")
    ] = Recipe.steps,
    batch: Annotated[int, typer.Option(help="Rows in a step.")] = Recipe.batch,
    context: Annotated[int, typer.Option(help="Tokens in a row; documents are packed into it.")] = Recipe.context,
    peak_rate: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = Recipe.peak_rate,
    warmup: Annotated[int, typer.Option(help="Steps of the warm-up.")] = Recipe.warmup,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = Recipe.vocab_size,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = Recipe.layers,
    hidden: Annotated[int, typer.Option(help="Hidden width.")] = Recipe.hidden,
    head_dim: Annotated[int, typer.Option(help="Width of an attention head.")] = Recipe.head_dim,
    mlp: Annotated[int, typer.Option(help="Width of the feed-forward layers.")] = Recipe.mlp,
    seed: Annotated[int, typer.Option(help="Decides weights, order and split.")] = Recipe.seed,
) -> None:
    """Train a model, from nothing or from where an unfinished run stopped.

    However often a run is stopped and resumed, it computes the same model.
    """
    with _errors_on_one_line():
        if minutes is not None and not minutes > 0:
            raise InvalidValueError("minutes", minutes, "a number above 0")
        recipe = Recipe(vocab_size, layers, hidden, head_dim, mlp, context, batch, steps, warmup, peak_rate, seed)
        measured = None if heldout is None else read_exchanges(heldout, "heldout")
        training, measured = split(read_exchanges(data, "data"), measured, heldout_fraction, seed)
        _claim(out, resume)
        if not resume:
            trained_tokenizer(training, vocab_size).save_pretrained(out)
        tokenizer = AutoTokenizer.from_pretrained(out)
        run = new_run(recipe, [prompt + answer for prompt, answer in encoded(tokenizer, training)])
        if resume:
            restore(run, out)
        console.print(
            f"{len(training)} documents of {sum(map(len, run.documents))} tokens; {len(measured)} exchanges held out;"
            f" {sum(p.numel() for p in run.model.parameters())} parameters; from step {run.step} of {steps}"
        )
        _train_with_progress(run, out, None if minutes is None else time.monotonic() + 60 * minutes)
        save_model(run, out)
        if run.step < steps:
            console.print(f"stopped at step {run.step} of {steps}; go on with --resume and otherwise the same options")
        else:
            (out / CHECKPOINT).unlink(missing_ok=True)
        console.print(f"{out}: {evaluate_folder(out, measured)}")


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="Folder of a model that `train` wrote.")],
    data: Annotated[Path, typer.Argument(help="JSONL of exchanges that the model was not trained on.")],
) -> None:
    """Measure how well a model foresees the answers, given the questions, in fp32."""
    with _errors_on_one_line():
        if not (model / "config.json").is_file():
            raise InvalidValueError("model", str(model), "a folder with a config.json, as `train` writes it")
        console.print(str(evaluate_folder(model, read_exchanges(data, "data"))))


def evaluate_folder(model: Path, heldout: list[Exchange]) -> Evaluation:
    """What is in the folder, as others will load it, in fp32."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return evaluate_on(loaded, AutoTokenizer.from_pretrained(model), heldout)


def _claim(out: Path, resume: bool) -> None:
    """Makes the folder of a new run, or checks that there is a run to resume."""
    if resume and not (out / CHECKPOINT).is_file():
        raise InvalidValueError("out", str(out), f"with --resume, the folder of an unfinished run ({CHECKPOINT} in it)")
    if not resume:
        if out.is_file() or (out.is_dir() and any(out.iterdir())):
            raise InvalidValueError("out", str(out), "a new or empty folder; --resume goes on with an unfinished run")
        out.mkdir(parents=True, exist_ok=True)


def _train_with_progress(run: Run, out: Path, deadline: float | None) -> None:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("steps", total=run.recipe.steps, completed=run.step, loss=math.nan)
        smoothed = math.nan

        def after_step(loss: float) -> None:
            nonlocal smoothed
            smoothed = loss if math.isnan(smoothed) else 0.95 * smoothed + 0.05 * loss
            progress.update(task, completed=run.step, loss=smoothed)
            if run.step % CHECKPOINT_EVERY == 0:
                save_checkpoint(run, out)
                progress.console.print(f"step {run.step}: loss {smoothed:.3f}")

        train_until(run, math.inf if deadline is None else deadline, after_step)
    save_checkpoint(run, out)


@contextmanager
def _errors_on_one_line() -> Iterator[None]:
    """What the user can put right ends the command with status 2 and its message, not with a traceback."""
    transformers_logging.disable_progress_bar()
    try:
        yield
    except InvalidValueError as error:
        console.print(f"Error: {error}", style="red", markup=False)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
