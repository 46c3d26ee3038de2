"""Trains a draft head for a model from texts that the model writes itself.

    python tools/train_head.py texts --model smollm2-135m --out texts.npz
    python tools/train_head.py train texts.npz --model smollm2-135m --out head
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from draftwood_benchmarks.harness.models import ModelOptions, chosen_model
from draftwood_benchmarks.harness.report import console
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.sequence import Sequence as EngineSequence
from draftwood_strategies.arrays import Int32Array

app = typer.Typer(
    help="Train a draft head in the form of EAGLE-3 for a model, from the model's own texts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

BEGINNINGS = (
    "", "", "", "", "", "", "",
    "Write a Python function", "Complete this Python function:\n\ndef ", "def ", "Fix the bug in this code:\n",
    "Rewrite this code with better names:\n", "Explain this code:\n",
    "Solve this problem: ", "A shop sells", "If a train", "How many", "Calculate",
    "Write a short story", "Write an email", "Summarize the following text: ", "Correct the grammar: ",
    "Rewrite the following text: ", "What is the difference between", "Give me a list of", "Explain how",
    "Answer in JSON: ", "I need help with my order",
)  # fmt: skip
"""With what questions begin; the model writes on. Empty ones are whatever it was asked most in its training."""
_AT_ONCE = 64
_QUESTION_TOKENS, _ANSWER_TOKENS = 128, 384


class Texts(NamedTuple):
    """Conversations that a model wrote.

    Attributes:
        tokens: int32[n], of all of them, one after the other.
        offsets: int64[t + 1], where each begins.
        answers: int64[t], where its answer begins, counted from its own beginning.
    """

    tokens: Int32Array
    offsets: Any
    answers: Any


@app.callback()
def _main() -> None:
    pass


@app.command()
def texts(
    out: Annotated[Path, typer.Option(help="New file, .npz.")],
    model: Annotated[str, typer.Option(help="Folder, GGUF file, hub id or name of the model.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=1, help="Of all answers.")] = 400_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Let the model ask questions, and answer them, half of them greedily."""
    with chosen_model(ModelOptions(model=model)) as chosen:
        loaded = chosen.load()
    config = EngineConfig(max_running=_AT_ONCE, adaptive_budget=False, kv_cache_tokens=_AT_ONCE * 1024, prefix_cache=False)
    engine = Engine(loaded, config)
    import time
    began = time.time()
    written: list[tuple[Int32Array, int]] = []
    total, number = 0, seed << 32
    while total < tokens:
        asked = list(_questions(engine, loaded, number))
        print(f"{time.time() - began:.0f} s: {len(asked)} questions", flush=True)
        for text, begins in _answers(engine, loaded, asked, number):
            written.append((text, begins))
            total += text.size - begins
        print(f"{time.time() - began:.0f} s: {total} tokens", flush=True)
        number += 4 * _AT_ONCE
        save(Texts(np.concatenate([t for t, _ in written]), np.cumsum([0, *(t.size for t, _ in written)]), np.array([b for _, b in written])), out)
    engine.close()
    console.print(f"{len(written)} conversations, {total:,} tokens of answers")


def save(texts: Texts, out: Path) -> None:
    np.savez_compressed(out, **texts._asdict())


def _questions(engine: Engine, model: LoadedModel, first: int) -> Iterator[str]:
    """Questions that the model writes by itself after its chat template's beginning of a question (Magpie, arXiv
    2406.08464), sampled at temperature 1."""
    marker = "\x00"
    template = model.tokenizer.render([{"role": "user", "content": marker}], None)
    before = template.partition(marker)[0]
    beginnings = [BEGINNINGS[i % len(BEGINNINGS)] for i in range(4 * _AT_ONCE)]
    sampling = SamplingParams(temperature=1.0, top_k=50)
    prompts = [model.tokenizer.encode(before + beginning) for beginning in beginnings]
    outputs = _finish(engine, prompts, [sampling] * len(prompts), first, _QUESTION_TOKENS)
    for beginning, output in zip(beginnings, outputs, strict=True):
        question = (beginning + model.tokenizer.decode(output)).strip()
        if len(question) > 8:
            yield question


def _answers(engine: Engine, model: LoadedModel, questions: Sequence[str], first: int) -> Iterator[tuple[Int32Array, int]]:
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": q}]) for q in questions]
    greedy, sampled = SamplingParams(), SamplingParams(temperature=0.8, top_k=50)
    sampling = [greedy if i % 2 else sampled for i in range(len(prompts))]
    for prompt, output in zip(prompts, _finish(engine, prompts, sampling, first, _ANSWER_TOKENS), strict=True):
        yield np.concatenate([prompt, output]), prompt.size


def _finish(engine: Engine, prompts: Sequence[Int32Array], sampling: Sequence[SamplingParams], first: int, most: int) -> list[Int32Array]:
    from dataclasses import replace
    sequences = [
        EngineSequence(Request(request_id=str(i), prompt=prompt, stop=StopParams(max_tokens=most), sampling=replace(how, seed=first + i)))
        for i, (prompt, how) in enumerate(zip(prompts, sampling, strict=True))
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return [s.tokens(s.request.prompt.size, s.length - s.request.prompt.size) for s in sequences]


if __name__ == "__main__":
    app()
