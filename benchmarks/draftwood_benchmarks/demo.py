"""`draftwood demo`: real questions through a real service, with drafting off and on, and by transformers' `generate`.

A tenant first asks some questions, from which its memory learns. Then each measured question is answered in all modes
one after the other, so that other load on the machine slows all of them alike, and every token is compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from draftwood_benchmarks.harness.prompts import MT_BENCH, QUESTIONS, read_questions
from draftwood_benchmarks.harness.report import OutputOptions, console, progress, table
from draftwood_benchmarks.harness.servers import ServerError, running_server
from draftwood_client import ChatMessage, Client, Completion
from draftwood_client.cli.apps import new_app, run
from draftwood_client.cli.options import command
from draftwood_memory.settings import cache_folder
from draftwood_model_runner.errors import DraftwoodError, ModelNotFoundError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.loading.sources import resolve

_BUNDLED = "bundled"
_MODEL = "smollm2-135m"
_MAX_TOKENS = 64
"""Of an answer: with 96, six questions take longer than two minutes on two cores."""
_DTYPE = "float32"
"""In which equal logits are rare, so that answers can be compared."""
_NEW, _LEARNING, _OTHER = "new", "acme", "umbrella"
"""Tenants: one that begins with an empty memory, one that asks other questions first, and one that asks after it."""
_TITLES = {"off": "drafting off", "cold": "cold", "warm": "warm"}
_TITLES |= {"repeated": "asked again", "other-tenant": "another tenant"}
"""Modes, in the order in which a question is asked in them."""
app = new_app()


def demo(args: list[str]) -> int:
    """The command `draftwood demo`. Returns the exit status."""
    return run(app, args, "demo", {ServerError: 1, DraftwoodError: 1})


@dataclass(slots=True)
class Answers:
    """The measured questions in one mode.

    Attributes:
        outputs: each answer's tokens.
        seconds: time to the complete answer as the client measures it, summed over the questions.
        steps: forward passes with a token of the answer; 0 for transformers.
    """

    outputs: list[tuple[int, ...]] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds

    def add(self, output: tuple[int, ...], seconds: float, steps: int = 0) -> None:
        self.outputs.append(output)
        self.seconds += seconds
        self.steps += steps

    def row(self, mode: str, plain: Answers, reference: Answers) -> dict[str, Any]:
        """The figures for `--json`; `plain` and `reference` have the same questions with drafting off and by
        transformers."""
        same = sum(ours == theirs for ours, theirs in zip(self.outputs, reference.outputs, strict=True))
        return {
            "mode": mode,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "vs_transformers": round(self.tokens_per_s / reference.tokens_per_s, 2),
            "vs_plain": round(self.tokens_per_s / plain.tokens_per_s, 2),
            "tokens_per_step": round(sum(map(len, self.outputs)) / self.steps, 2),
            "identical_answers": same,
            "answers": len(self.outputs),
            "identical": same == len(self.outputs),
        }


@app.command()
@command
def _demo(
    output: OutputOptions,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Name, folder, GGUF file or hub id; bundled: the bundled model.")
    ] = _MODEL,
    questions: Annotated[int, typer.Option(min=1, max=8, help="Measured questions.")] = 6,
    warmup: Annotated[
        int, typer.Option(min=0, max=72, help="Other questions, which the memory of the warm tenant learns from.")
    ] = 16,
    show: Annotated[int, typer.Option(min=0, max=8, help="Warm answers to show.")] = 1,
) -> None:
    """Ask a real model real questions: by transformers' generate, with drafting off, with an empty memory, with one
    that has learned from other answers, again, and as another tenant. The model is downloaded once; if it cannot be,
    the bundled one answers customer-support questions.

    Ends with status 1 if any output differs from that of generate in a single token.
    """
    name, path = _chosen(model)
    measured, others = read_questions(QUESTIONS if path == BUNDLED_MODEL else MT_BENCH)
    measured, others = measured[:questions], others[:warmup]
    console.print("The first start after an installation compiles the strategies, which takes about a minute.")
    console.print(f"Starting a service with {name}")
    with running_server("--model", path, "--dtype", _DTYPE) as target:
        reference, answers = _measure(target, path, measured, others, show)
    rows = [of_mode.row(mode, answers["off"], reference) for mode, of_mode in answers.items()]
    identical = all(row["identical"] for row in rows)
    output.report(
        _table(name, reference, rows, len(others)),
        rows,
        model=name,
        questions=len(measured),
        warmup=len(others),
        transformers={"tokens_per_s": round(reference.tokens_per_s, 1)},
    )
    console.print(
        "All outputs are identical to transformers' own greedy generate, token for token."
        if identical
        else "[bold red]Some outputs differ.[/bold red] This is a defect: please report it."
    )
    if not identical:
        raise typer.Exit(1)


def _chosen(model: str) -> tuple[str, str]:
    """(name, folder or hub id). Raises DraftwoodError for a model that was asked for and cannot be had."""
    if model == _BUNDLED:
        return "the bundled model", BUNDLED_MODEL
    try:
        with console.status(f"Preparing {model}: it is downloaded and converted once, which takes some minutes"):
            return model, resolve(model, cache_folder(os.environ), os.environ)
    except ModelNotFoundError as error:
        if model != _MODEL:
            raise
        console.print(Text(f"{error}.\nThe bundled model answers customer-support questions instead."))
        return "the bundled model", BUNDLED_MODEL


def _measure(
    target: str, path: str, measured: Sequence[str], others: Sequence[str], show: int
) -> tuple[Answers, dict[str, Answers]]:
    """(by transformers, by mode)."""
    reference, answers = Answers(), {mode: Answers() for mode in _TITLES}
    with Client(target, timeout=600) as client:
        generate = _transformers_generate(path)
        first = (list(others) or list(measured))[0]
        generate(first)  # the first run is slower
        _ask(client, first, Answers(), drafting=False)
        for text in progress(others, f"{_LEARNING} asks other questions"):
            _ask(client, text, Answers(), tenant=_LEARNING)
        for text in progress(measured, "each question in all modes"):
            started = time.perf_counter()
            output = generate(text)
            reference.add(output, time.perf_counter() - started)
            _ask(client, text, answers["off"], drafting=False)
            _ask(client, text, answers["cold"], tenant=_NEW)
            _ask(client, text, answers["warm"], tenant=_LEARNING, show=len(reference.outputs) <= show)
            _ask(client, text, answers["repeated"], tenant=_LEARNING)
            _ask(client, text, answers["other-tenant"], tenant=_OTHER)
    return reference, answers


def _ask(client: Client, text: str, into: Answers, show: bool = False, **options: Any) -> None:
    """Asks, and shows the answer if wished: tokens accepted from a draft are green."""
    started = time.perf_counter()
    options |= {"max_tokens": _MAX_TOKENS, "temperature": 0.0, "token_details": show}
    completion: Completion = client.generate([ChatMessage("user", text)], **options)
    into.add(completion.token_ids, time.perf_counter() - started, completion.drafting.steps)
    if show:
        pieces = [(detail.text, "green" if detail.drafted else "") for detail in completion.details]
        console.print(Text.assemble(("\n[warm] ", "dim"), (text, "bold"), "\n", *pieces))
        tokens, steps = len(completion.token_ids), completion.drafting.steps
        console.print(Text(f"{tokens} tokens in {steps} steps; green: accepted from a draft\n", "dim"))


def _transformers_generate(path: str) -> Callable[[str], tuple[int, ...]]:
    """Greedy `generate` of transformers on a model, as its users call it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def generate(text: str) -> tuple[int, ...]:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=_MAX_TOKENS, do_sample=False)
        return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())

    return generate


def _table(name: str, reference: Answers, rows: list[dict[str, Any]], others: int) -> Table:
    off = next(row["tokens_per_s"] for row in rows if row["mode"] == "off")
    speed = reference.tokens_per_s
    first = {"title": "generate", "tokens_per_s": speed, "vs_transformers": 1.0, "vs_plain": speed / off}
    ours = [
        row | {"title": _TITLES[row["mode"]], "same": f"{row['identical_answers']} of {row['answers']}"} for row in rows
    ]
    columns = {"": "{title}", "tokens/s": "{tokens_per_s:.1f}", "x generate": "{vs_transformers:.2f}"}
    columns |= {"x off": "{vs_plain:.2f}", "tokens/step": "{tokens_per_step:.2f}", "identical": "{same}"}
    caption = (
        f"cold: by a tenant whose memory is empty at the first question; warm: by one that asked {others} other"
        " questions first; asked again: by that one; another tenant: after that; identical: answers equal to those of"
        " transformers' generate, token for token"
    )
    return table(f"{name}, {rows[0]['answers']} questions", [first, *ours], columns, texts=1, caption=caption)
