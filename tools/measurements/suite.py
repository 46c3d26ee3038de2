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
        arguments: of `draftwood bench`.
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
)
