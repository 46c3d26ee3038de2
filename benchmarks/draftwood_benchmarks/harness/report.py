"""Reports of benchmarks: progress bars, tables, JSON files, and the error that ends a benchmark."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, TypeVar

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from draftwood_model_runner.errors import DraftwoodError, InvalidInputError
from draftwood_model_runner.runners.machine import processor_name

Item = TypeVar("Item")
Rows = list[dict[str, Any]]
console = Console(highlight=False)


class BenchmarkError(DraftwoodError):
    """A measurement failed, or found a defect."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The file that the report is written to, besides the terminal.

    Raises:
        InvalidInputError: it cannot be written, which is known before anything is measured.
    """

    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures here, as JSON.", dir_okay=False),
    ] = None

    def __post_init__(self) -> None:
        if self.json_file is not None and not self.json_file.absolute().parent.is_dir():
            raise InvalidInputError("--json", self.json_file, "its folder does not exist")

    def report(self, shown: Table, rows: Sequence[object], **more: object) -> None:
        """Prints the table, and writes `{"run": run_facts(), "rows": rows, **more}` as JSON."""
        console.print(shown)
        self.write(rows, **more)

    def write(self, rows: Sequence[object], **more: object) -> None:
        if self.json_file is not None:
            report = {"run": run_facts(), "rows": rows, **more}
            self.json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def progress(items: Sequence[Item], title: str) -> Iterable[Item]:
    """The items, with a progress bar."""
    return track(items, title, console=console, refresh_per_second=2, transient=True)


def table(
    title: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], *, texts: int = 0, caption: str = ""
) -> Table:
    """A table of rows.

    Args:
        columns: by heading, how a row is shown, as of `str.format`; a missing number is "-".
        texts: so many columns, the first ones, hold texts, and the others numbers.
    """
    padding = (0, 1 if len(columns) < 8 else 0)  # 80 columns
    made = Table(title=title, title_justify="left", caption=caption or None, pad_edge=False, padding=padding)
    for number, heading in enumerate(columns):
        made.add_column(heading, justify="left" if number < texts else "right", no_wrap=number < texts)
    for row in rows:
        made.add_row(*(_FORMATTER.vformat(cell, (), row) for cell in columns.values()))
    return made


def half_range(row: Mapping[str, Any]) -> float | None:
    """Of the tokens per second of rounds or windows, relative to them."""
    speed = row["tokens_per_s"]
    return (row["tokens_per_s_max"] - row["tokens_per_s_min"]) / 2 / speed if speed else None


class _Formatter(Formatter):
    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else str(super().format_field(value, format_spec))


_FORMATTER = _Formatter()


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile, 0 to 100, linear between the two nearest ranks; None if there are no values."""
    return float(np.percentile(values, percent)) if values else None


def run_facts() -> dict[str, Any]:
    """Command, without the file that it writes; date in UTC as YYYY-MM-DD; version of the benchmarks, None if they are
    not installed; commit that the code was installed from, with "-dirty" if files were changed, None outside a clone;
    processor, "" if it is unknown; cores that the process may use."""
    installed, commit = None, None
    with suppress(PackageNotFoundError):
        installed = version("draftwood-benchmarks")
    with suppress(OSError, subprocess.SubprocessError):
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # an environment may lie in somebody else's clone
        commit = _git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=9")
    return {
        "command": command(sys.argv[1:]),
        "date": datetime.now(UTC).date().isoformat(),
        "version": installed,
        "commit": commit,
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
    }


def command(arguments: Iterable[str]) -> str:
    """The command line of `draftwood` with these arguments, without the file that it writes."""
    kept, left = list[str](), iter(arguments)
    for argument in left:
        if argument == "--json":
            next(left, None)
        elif not argument.startswith("--json="):
            kept.append(argument)
    return shlex.join(["draftwood", *kept])


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


BUSY = 0.1
"""Share of the machine's CPU time from which the report warns. Not tuned: on two cores it is a fifth of one core."""


class OtherLoad:
    """Counts from its creation. Processes that this one started, directly or not, are part of the benchmark."""

    def __init__(self) -> None:
        self._started = _cpu_seconds()

    def share(self) -> float | None:
        """Share of the CPU time of all cores that other processes or virtual machines took, 0 to 1; None at once after
        the creation."""
        total, busy, ours = (after - before for after, before in zip(_cpu_seconds(), self._started, strict=True))
        return min(1.0, max(0.0, (busy - ours) / total)) if total > 0 else None


def warning(busy: float | None) -> str:
    """A line for the title of a table; empty if the machine had little else to do."""
    if busy is None:
        return "\nload of other processes unknown"
    if busy < BUSY:
        return ""
    return f"\nBUSY MACHINE: other processes took {busy:.0%} of the CPU time; do not rely on these figures"


def _cpu_seconds() -> tuple[float, float, float]:
    """CPU time of the machine, its busy part, and that of this process and its descendants."""
    times = psutil.cpu_times()._asdict()
    total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)  # which user and nice have too
    ours = 0.0
    for process in [me := psutil.Process(), *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            ours += sum(process.cpu_times()[:4])  # user, system, and those of children that have ended
    return total, total - times["idle"] - times.get("iowait", 0.0), ours
