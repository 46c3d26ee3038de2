"""What is measured, by which commands, and how its rows are shown as tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from draftwood_benchmarks.load import table_of as load
from draftwood_benchmarks.never_slower import table_of as never_slower
from draftwood_benchmarks.speed import table_of as speed

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDER = DOCS / "measurements"
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A section of the page.

    Attributes:
        name: of the JSON file.
        arguments: of `draftwood bench`. $prompts and $code_model stand for paths that are given when it is measured,
            and stay as they are in its file.
        table: of the rows, as the benchmark prints it.
    """

    name: str
    heading: str
    arguments: str
    table: Callable[[Rows], Table]

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.json"


_PEER = "--peer openvino-genai"
_REAL_MODEL = "--model smollm2-135m --dtype bfloat16"
_SOURCES = "--strategy trie --strategy head --strategy hybrid"
"""A memory, the head that comes with Draftwood for this model, and both."""
_CODE_MODEL = "--model $code_model --dtype bfloat16"
"""A GGUF file of Qwen2.5-Coder-0.5B-Instruct."""
_NGRAMS = "--peer-drafts none --peer-drafts ngram-simple"
_VLLM = f"{_PEER} --peer vllm --peer-drafts none --peer-drafts suffix"
_WEIGHTS = {
    "bfloat16": ("bfloat16", _VLLM),
    "int8": ("8-bit weights", f"--weights int8 {_PEER}"),
    "int4": ("4-bit weights", f"--weights int4 {_PEER} --peer llama.cpp {_NGRAMS}"),
}
"""How a real model is computed: by name the words for headings and the options. vLLM quantizes nothing, and llama.cpp
computes what its file has."""
_CHAT = "--limit 5 --warm 64 --max-tokens 128 --rounds 2"
"""MT-Bench has 80 first questions."""
_MATH = "--limit 5 --warm 100 --max-tokens 128 --rounds 1"
_LONG = "--limit 4 --warm 24 --max-tokens 128 --rounds 1"
"""For prompts of hundreds of tokens, or a model of half a billion parameters."""


def _real(name: str, heading: str, arguments: str) -> Measurement:
    table = speed if arguments.startswith("speed") else load
    return Measurement(name, heading, arguments, lambda rows: table(rows, ""))


def _real_models() -> tuple[Measurement, ...]:
    """Prompts are from files of public benchmarks and from `prompts.py`. Those of Spec-Bench have one of its categories
    each."""
    streams = "--concurrency 1,8,32 --duration 30 --warm 24 --max-tokens 128 --prompts $prompts/mtbench.jsonl"
    commands = []
    for name, (words, options) in _WEIGHTS.items():
        hybrid = "--strategy hybrid --sampled"
        chat_by = _SOURCES if name == "bfloat16" else hybrid
        chat = f"speed {_REAL_MODEL} {options} {chat_by} {_CHAT} --prompts $prompts/mtbench.jsonl"
        code = f"speed {_CODE_MODEL} {options} {hybrid} {_LONG} --prompts $prompts/humaneval.jsonl"
        many = f"load {_REAL_MODEL} {options} {streams}"
        commands += [
            _real(f"smollm2-chat-{name}", f"SmolLM2 135M, MT-Bench, one stream, {words}", chat),
            _real(f"smollm2-streams-{name}", f"SmolLM2 135M, MT-Bench, 1 to 32 streams, {words}", many),
            _real(f"coder-code-{name}", f"Qwen2.5-Coder 0.5B Instruct, HumanEval, one stream, {words}", code),
        ]
    for name, file, which, how in (
        ("math", "gsm8k-test", "GSM8K", _MATH),
        ("code", "humaneval", "HumanEval", _LONG),
        ("edits", "edits", "edits of HumanEval's functions", _LONG),
        ("agents", "agents", "JSON of an agent's tools", _LONG),
        ("summaries", "specbench-summarization", "summaries of Spec-Bench", _LONG),
        ("retrieval", "specbench-rag", "questions with retrieved text of Spec-Bench", _LONG),
    ):
        arguments = f"speed {_REAL_MODEL} {_PEER} {_SOURCES} {how} --prompts $prompts/{file}.jsonl"
        commands.append(_real(f"smollm2-{name}", f"SmolLM2 135M, {which}, one stream, bfloat16", arguments))
    return tuple(commands)


MEASUREMENTS = (
    *_real_models(),
    Measurement(
        "never-slower",
        "Where drafts bring nothing",
        f"never-slower {_REAL_MODEL}",
        lambda rows: never_slower(rows, ""),
    ),
)
