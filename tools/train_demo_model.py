"""Trains a small chat model on questions and answers: tokenizer, Llama weights and chat template.

    python tools/train_demo_model.py train support.jsonl --heldout heldout.jsonl --out model
    python tools/train_demo_model.py evaluate model heldout.jsonl

The command line only: `tools.demo_model.corpus` prepares the data, `tools.demo_model.training` trains the model.
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

from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
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
"""Steps between checkpoints, about five minutes of training on one core; not tuned."""

app = typer.Typer(
    help="Train and evaluate models like the one in model_runner/draftwood_model_runner/loading/demo.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
console = Console(soft_wrap=True)


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="JSONL with 'instruction' and 'response' in each line.")],
    out: Annotated[Path, typer.Option(help="Folder for the model, and for the checkpoint of an unfinished run.")],
    heldout: Annotated[
        Path | None, typer.Option(help="JSONL of exchanges to evaluate on; they are left out of the training data.")
    ] = None,
    heldout_fraction: Annotated[float, typer.Option(help="Share of the data to hold out without --heldout.")] = 0.02,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after this many minutes, with a checkpoint for --resume.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the unfinished run in --out.")] = False,
    steps: Annotated[
        int, typer.Option(help="Steps of the whole run; the learning rate decays over them.")
    ] = Recipe.steps,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = Recipe.batch,
    context: Annotated[int, typer.Option(help="Tokens per row; documents are packed into rows.")] = Recipe.context,
    peak_rate: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = Recipe.peak_rate,
    warmup: Annotated[int, typer.Option(help="Steps of the warm-up.")] = Recipe.warmup,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = Recipe.vocab_size,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = Recipe.layers,
    hidden: Annotated[int, typer.Option(help="Hidden width.")] = Recipe.hidden,
    head_dim: Annotated[int, typer.Option(help="Width of an attention head.")] = Recipe.head_dim,
    mlp: Annotated[int, typer.Option(help="Width of the feed-forward layers.")] = Recipe.mlp,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and split.")] = Recipe.seed,
) -> None:
    """Train a model from scratch, or continue an unfinished run.

    Interruptions do not change the model that a run computes.
    """
    with _errors_on_one_line():
        if minutes is not None and not minutes > 0:
            raise InvalidValueError("minutes", minutes, "it must be above 0")
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
            console.print(
                f"stopped at step {run.step} of {steps}; continue with --resume and otherwise the same options"
            )
        else:
            (out / CHECKPOINT).unlink(missing_ok=True)
        console.print(f"{out}: {evaluate_folder(out, measured)}")


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="Folder of a model that `train` wrote.")],
    data: Annotated[Path, typer.Argument(help="JSONL of exchanges that the model was not trained on.")],
) -> None:
    """Evaluate how well a model predicts the answers, given the questions, in fp32."""
    with _errors_on_one_line():
        if not (model / "config.json").is_file():
            raise InvalidInputError("model", model, "no config.json in this folder; `train` writes one")
        console.print(str(evaluate_folder(model, read_exchanges(data, "data"))))


def evaluate_folder(model: Path, heldout: list[Exchange]) -> Evaluation:
    """Evaluates the model in the folder, loaded by transformers in fp32."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return evaluate_on(loaded, AutoTokenizer.from_pretrained(model), heldout)


def _claim(out: Path, resume: bool) -> None:
    """Creates the folder of a new run, or checks that there is a run to resume."""
    if resume and not (out / CHECKPOINT).is_file():
        raise InvalidInputError("out", out, f"no unfinished run to resume ({CHECKPOINT} is missing)")
    if not resume:
        if out.is_file() or (out.is_dir() and any(out.iterdir())):
            raise InvalidInputError("out", out, "not a new or empty folder; --resume continues an unfinished run")
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
    """An invalid value ends the command with its message and status 2, without a traceback."""
    transformers_logging.disable_progress_bar()
    try:
        yield
    except InvalidValueError as error:
        console.print(f"Error: {error}", style="red", markup=False)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
