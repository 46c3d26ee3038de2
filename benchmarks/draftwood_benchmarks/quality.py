"""`draftwood bench quality`: the likelihood of a text by a model, in its own data type and with quantized weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from draftwood_benchmarks.harness.models import ModelOptions, chosen_model, describe
from draftwood_benchmarks.harness.prompts import encode, lines_of
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, Rows, console, progress, table
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidValueError
from draftwood_strategies.draft import Int32Array

if TYPE_CHECKING:
    from draftwood_model_runner.loading.model import LoadedModel


class Scores(NamedTuple):
    """What a model makes of the tokens of all answers.

    Attributes:
        nats: float64[n], the negative log-likelihood of each token, given all before it.
        most_probable: int32[n], the token that the model would have written there.
    """

    nats: np.ndarray[Any, np.dtype[np.float64]]
    most_probable: Int32Array


@command
def quality(
    model: ModelOptions,
    output: OutputOptions,
    text: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Held-out text: JSON lines with `instruction` and `response`."),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Lines to read; all by default.", show_default=False)] = None,
) -> None:
    """Mean negative log-likelihood of held-out answers, with the weights as they are and quantized."""
    if model.weights == "as-is":
        raise InvalidValueError("weights", model.weights, "it must be int8 or int4, which is compared with as-is")
    texts = read_texts(text)[:limit]
    scores: dict[str, Scores] = {}
    with chosen_model(model) as chosen:
        for weights in ("as-is", model.weights):
            with console.status(f"Loading the model, weights {weights}"):
                loaded = replace(chosen, options=replace(model, weights=weights)).load()
            exchanges = _encoded(loaded, texts)
            if not exchanges:
                raise BenchmarkError(f"{text}: no line fits the context of {loaded.max_context} tokens")
            scores[weights] = score(loaded, exchanges)
    rows, title = rows_of(scores), describe(chosen, loaded)
    columns = {"weights": "{weights}", "nats per token": "{nats_per_token:.4f}", "perplexity": "{perplexity:.4f}"}
    columns |= {"nats more": "{nats_more:+.5f} +- {error:.5f}", "same next token": "{agreement:.2%}"}
    caption = "nats more: than as-is, with its standard error; same next token: as as-is would write"
    heading = f"{title}\n{len(exchanges)} answers, {rows[0]['tokens']} tokens"
    output.report(table(heading, rows, columns, texts=1, caption=caption), rows, model=title, answers=len(exchanges))


def read_texts(path: Path) -> list[tuple[str, str]]:
    """Questions and answers. Raises BenchmarkError: the file cannot be read, is empty, or has a line without them."""
    texts = []
    for number, line in lines_of(path):
        try:
            row = json.loads(line)
            question, answer = row["instruction"], row["response"]
        except (ValueError, KeyError, TypeError):
            question = answer = None
        if not isinstance(question, str) or not isinstance(answer, str):
            raise BenchmarkError(f"{path}, line {number}: no JSON object with the texts `instruction` and `response`")
        texts.append((question, answer))
    return texts


def score(model: LoadedModel, exchanges: list[tuple[Int32Array, Int32Array]]) -> Scores:
    """One pass over each question and answer, int32[q] and int32[a], as the runner of the model computes a prompt."""
    import torch

    from draftwood_model_runner.runners.batch import BatchRow, lay_out
    from draftwood_strategies.draft import EMPTY_TREE

    runner = model.factory.runner(kv_tokens=max(question.size + answer.size for question, answer in exchanges))
    pages = np.arange(runner.pages, dtype=np.int32)
    nats, most_probable = [], []
    for question, answer in progress(exchanges, "reading answers"):
        tokens = np.concatenate([question, answer])[:-1]
        row = BatchRow(pages, 0, tokens, EMPTY_TREE, logits_from=question.size - 1)
        predictions = runner.step(lay_out([row]), 0)
        log_probabilities = torch.log_softmax(torch.as_tensor(predictions.logits).float(), -1).cpu()
        nats.append(-log_probabilities.numpy()[np.arange(answer.size), answer].astype(np.float64))
        most_probable.append(predictions.tokens.copy())
    return Scores(np.concatenate(nats), np.concatenate(most_probable))


def rows_of(scores: dict[str, Scores]) -> Rows:
    """A row for each kind of weights; "agreement" is the share of tokens after which it would write the same token as
    the first kind, "nats_more" the mean difference to it and "error" the standard error of that."""
    first = next(iter(scores.values()))
    rows = []
    for weights, (nats, most_probable) in scores.items():
        more = nats - first.nats
        rows.append(
            {
                "weights": weights,
                "tokens": int(nats.size),
                "nats_per_token": round(float(nats.mean()), 5),
                "perplexity": round(math.exp(nats.mean()), 4),
                "nats_more": round(float(more.mean()), 5),
                "error": round(float(more.std() / nats.size**0.5), 5),
                "agreement": round(float((most_probable == first.most_probable).mean()), 5),
            }
        )
    return rows


def _encoded(model: LoadedModel, texts: list[tuple[str, str]]) -> list[tuple[Int32Array, Int32Array]]:
    """Those that fit the context. Answers end with the end-of-sequence token, if there is just one."""
    end = np.array(list(model.eos_token_ids) if len(model.eos_token_ids) == 1 else [], np.int32)
    pairs = [
        (encode(model.tokenizer, question), np.concatenate([model.tokenizer.encode(answer), end]))
        for question, answer in texts
    ]
    return [pair for pair in pairs if pair[0].size + pair[1].size <= model.max_context]
