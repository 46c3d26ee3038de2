"""What is measured, by which commands, and how its rows are shown as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from draftwood_benchmarks.load import rows as load
from draftwood_benchmarks.overhead.growth import GrowthRow, growth_table
from draftwood_benchmarks.overhead.sampling import SamplingRow, sampling_table
from draftwood_benchmarks.replay import memory
from draftwood_benchmarks.speed import never_slower
from draftwood_benchmarks.speed import rows as speed

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDER = DOCS / "measurements"
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A section of the page.

    Attributes:
        name: of the JSON file.
        arguments: of `draftwood bench`.
        tables: of the rows, as the benchmark prints them.
    """

    name: str
    heading: str
    arguments: str
    tables: Callable[[Rows], Sequence[Table]]

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.json"


def _speed(rows: Rows) -> list[Table]:
    return [speed.table_of(rows, "")]


def _load(rows: Rows) -> list[Table]:
    return [load.table_of(rows, ""), load.first_tokens(rows)]


def _never_slower(rows: Rows) -> list[Table]:
    return [never_slower.table_of([never_slower.Row(**row) for row in rows], "")]


def _sampling(rows: Rows) -> list[Table]:
    return [sampling_table([SamplingRow(**row) for row in rows], "")]


def _growth(rows: Rows) -> list[Table]:
    return [growth_table([GrowthRow(**row) for row in rows], "")]


def _memory(rows: Rows) -> list[Table]:
    return [memory.table_of([memory.Row(**row) for row in rows])]


_REAL = "--shape 110m --vocabulary 151936 --dtype bfloat16"
_OWN = "--own-text 20000"
_PEER = "--peer openvino-genai"
MEASUREMENTS = (
    Measurement(
        "one-stream",
        "One stream, a real vocabulary",
        f"speed {_REAL} --sampled {_PEER} --strategy hybrid --limit 4 --warm 80 --max-tokens 150 {_OWN}",
        _speed,
    ),
    Measurement(
        "many-streams",
        "Many streams, a real vocabulary",
        f"load {_REAL} {_PEER} --concurrency 8,32 --duration 16 {_OWN}",
        _load,
    ),
    Measurement("never-slower", "Where drafts bring nothing", f"never-slower {_REAL} --rounds 4", _never_slower),
    Measurement(
        "four-bit-weights",
        "One stream, weights of 4 bits",
        f"speed --shape 110m --vocabulary 151936 --weights int4 {_PEER} --strategy hybrid --limit 4 --warm 80 "
        f"--max-tokens 150 {_OWN}",
        _speed,
    ),
    Measurement("memory", "A draft by the tokens in memory", "memory", _memory),
    Measurement("choosing-a-token", "Choosing a token", "overhead --sampling", _sampling),
    Measurement(
        "host-work",
        "The host's work by what it may grow with",
        "overhead --growth --rounds 5 --plot docs/images/growth.svg",
        _growth,
    ),
)
