"""Prompts to measure with: the bundled questions, a file of the user's, or random token ids; how they are sampled."""

from __future__ import annotations

import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood_benchmarks.harness.report import BenchmarkError

if TYPE_CHECKING:
    from draftwood_model_runner.loading.tokenizer import Tokenizer
    from draftwood_strategies.arrays import Int32Array

QUESTIONS = files("draftwood_benchmarks") / "questions.jsonl"
"""Customer-support questions, which the bundled model answers."""
MT_BENCH = files("draftwood_benchmarks") / "mt_bench.jsonl"
"""First turns of MT-Bench by LMSYS (FastChat, Apache 2.0): eight categories, one question of each in turn. Measured are
the first of each."""
PromptsOption = Annotated[
    Path | None, typer.Option(help="Prompts of your own: JSON lines or text lines. The bundled questions by default.")
]
SampledOption = Annotated[bool, typer.Option("--sampled", help="Sample: temperature 0.6, top-k 20, top-p 0.95.")]
SAMPLED: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
"""How `--sampled` samples: what models of today recommend in their generation config."""
KEYS = ("instruction", "text", "prompt", "turns", "question")
"""Keys of a JSON line that may hold its prompt, in order of precedence."""


def read_questions(file: Traversable = QUESTIONS) -> tuple[list[str], list[str]]:
    """(measured, warm-up): bundled questions."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    splits: dict[str, list[str]] = {"measured": [], "warmup": []}
    for row in rows:
        splits[row["split"]].append(row["text"])
    return splits["measured"], splits["warmup"]


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file of JSON lines or of plain lines; None for the bundled questions, the measured ones first.

    The first turn of a prompt with several turns is taken.

    Raises:
        BenchmarkError: the file cannot be read, or a line holds no prompt; names the line.
    """
    if path is None:
        measured, others = read_questions()
        return measured + others
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path}: {error}") from error
    prompts = [_prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise BenchmarkError(f"{path} holds no lines")
    return prompts


def _prompt(line: str, where: str) -> str:
    if not line.lstrip().startswith("{"):
        return line.strip()
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BenchmarkError(f"{where}: not JSON ({error})") from error
    value = next((row[key] for key in KEYS if key in row), None)
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str) or not value.strip():
        raise BenchmarkError(f"{where}: no text under any of {', '.join(KEYS)}")
    return value


def encode(tokenizer: Tokenizer, text: str) -> Int32Array:
    """int32[n]: a chat question if the model has a chat template, else a text to continue."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text)


def split(prompts: list[Int32Array], measured: int, warm: int) -> tuple[list[Int32Array], list[Int32Array]]:
    """(measured, warm-up): the first prompts and the ones after them.

    Raises:
        BenchmarkError: there are fewer than `measured + warm`.
    """
    if len(prompts) < measured + warm:
        raise BenchmarkError(
            f"--limit {measured} and --warm {warm} need {measured + warm} prompts, but only {len(prompts)} fit the"
            " model; use smaller values"
        )
    return prompts[:measured], prompts[measured : measured + warm]
