"""What is measured, by which commands, and how its rows are shown as tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from draftwood_benchmarks.load.rows import table_of as load
from draftwood_benchmarks.overhead.command import table_of as growth
from draftwood_benchmarks.replay.memory import table_of as memory
from draftwood_benchmarks.speed.never_slower import table_of as never_slower
from draftwood_benchmarks.speed.rows import table_of as speed

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


_REAL = "--shape 110m --vocabulary 151936 --dtype bfloat16"
_OWN = "--own-text 20000"
_PEER = "--peer openvino-genai"
_REAL_MODEL = "--model smollm2-135m --dtype bfloat16"
_CODE_MODEL = "--model $code_model --dtype bfloat16"
"""A GGUF file of Qwen2.5-Coder-0.5B-Instruct."""
_NGRAMS = "--peer-drafts none --peer-drafts ngram-simple"
_ALL_PEERS = f"{_PEER} --peer vllm --peer llama.cpp {_NGRAMS}"
_WEIGHTS = {
    "bfloat16": ("bfloat16", _ALL_PEERS),
    "int8": ("8-bit weights", f"--weights int8 {_PEER}"),
    "int4": ("4-bit weights", f"--weights int4 {_PEER} --peer llama.cpp {_NGRAMS}"),
}
"""How a real model is computed: by name the words for headings and the options. vLLM quantizes nothing; llama.cpp has
the 4-bit weights of its file in both runs."""
_SHORT = "--strategy hybrid --limit 8 --warm 24 --max-tokens 128 --rounds 2"
_LONG = "--strategy hybrid --limit 4 --warm 12 --max-tokens 128 --rounds 2"
"""For prompts of hundreds of tokens."""


def _real(name: str, heading: str, arguments: str) -> Measurement:
    table = speed if arguments.startswith("speed") else load
    return Measurement(name, heading, arguments, lambda rows: table(rows, ""))


def _real_models() -> tuple[Measurement, ...]:
    """Prompts are from files of public benchmarks. Those of Spec-Bench have one of its categories each."""
    streams = "--concurrency 1,8,32 --duration 16 --warm 24 --max-tokens 128 --prompts $prompts/mtbench.jsonl"
    found = []
    for name, (words, options) in _WEIGHTS.items():
        chat = f"speed {_REAL_MODEL} {options} --sampled {_SHORT} --prompts $prompts/mtbench.jsonl"
        code = f"speed {_CODE_MODEL} {options} --sampled {_LONG} --prompts $prompts/humaneval.jsonl"
        many = f"load {_REAL_MODEL} {options} {streams}"
        found += [
            _real(f"smollm2-chat-{name}", f"SmolLM2 135M, MT-Bench, one stream, {words}", chat),
            _real(f"smollm2-streams-{name}", f"SmolLM2 135M, MT-Bench, 1 to 32 streams, {words}", many),
            _real(f"coder-code-{name}", f"Qwen2.5-Coder 0.5B Instruct, HumanEval, one stream, {words}", code),
        ]
    options = _WEIGHTS["bfloat16"][1]
    for name, file, which, how in (
        ("math", "gsm8k-test", "GSM8K", _SHORT),
        ("summaries", "specbench-summarization", "summaries of Spec-Bench", _LONG),
        ("retrieval", "specbench-rag", "questions with retrieved text of Spec-Bench", _LONG),
    ):
        arguments = f"speed {_REAL_MODEL} {options} {how} --prompts $prompts/{file}.jsonl"
        found.append(_real(f"smollm2-{name}", f"SmolLM2 135M, {which}, one stream, bfloat16", arguments))
    return tuple(found)


MEASUREMENTS = (
    Measurement(
        "one-stream",
        "One stream, a real vocabulary",
        f"speed {_REAL} --sampled {_PEER} --strategy hybrid --limit 8 --warm 80 --max-tokens 150 {_OWN}",
        lambda rows: speed(rows, ""),
    ),
    Measurement(
        "many-streams",
        "Many streams, a real vocabulary",
        f"load {_REAL} {_PEER} --engine-alone --concurrency 8,32 --duration 16 {_OWN}",
        lambda rows: load(rows, ""),
    ),
    Measurement(
        "never-slower",
        "Where drafts bring nothing",
        f"never-slower {_REAL} --rounds 8",
        lambda rows: never_slower(rows, ""),
    ),
    Measurement(
        "four-bit-weights",
        "One stream, weights of 4 bits",
        f"speed --shape 110m --vocabulary 151936 --weights int4 {_PEER} --strategy hybrid --limit 4 --warm 80 "
        f"--max-tokens 150 {_OWN}",
        lambda rows: speed(rows, ""),
    ),
    Measurement("memory", "A draft by the tokens in memory", "memory", memory),
    Measurement(
        "host-work",
        "The host's work by what it may grow with",
        "overhead --growth --rounds 5 --plot docs/images/growth.svg",
        lambda rows: growth(rows, ""),
    ),
    *_real_models(),
)
