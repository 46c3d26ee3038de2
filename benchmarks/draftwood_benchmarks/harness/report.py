"""Reports of benchmarks: progress bars, JSON files, pictures, percentiles, and the error that ends a benchmark."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftwood_benchmarks.harness.run_facts import run_facts
from draftwood_model_runner.errors import DraftwoodError, InvalidInputError, InvalidValueError

Item = TypeVar("Item")


class BenchmarkError(DraftwoodError):
    """A measurement failed, or found a defect."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Files that the report is written to, besides the terminal."""

    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures here, as JSON.", dir_okay=False),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the figures here: PNG, SVG or PDF.", dir_okay=False),
    ] = None

    def check(self) -> None:
        """Before anything is measured. Raises BenchmarkError or InvalidValueError if a file cannot be written."""
        for flag, path in (("--json", self.json_file), ("--plot", self.plot)):
            if path is not None and not path.absolute().parent.is_dir():
                raise InvalidInputError(flag, path, "its folder does not exist")
        if self.plot is not None:
            if self.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
                raise InvalidValueError("--plot", str(self.plot), "it must end in .png, .svg or .pdf")
            require("matplotlib", "--plot")

    def write(self, rows: Sequence[object], draw: Callable[[Any], None], **more: object) -> None:
        """Writes `{"run": run_facts(), "rows": rows, **more}` as JSON, and the picture that `draw` makes on a
        matplotlib Axes.
        """
        if self.json_file is not None:
            report = {"run": run_facts(), "rows": rows, **more}
            self.json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if self.plot is not None:
            from matplotlib.figure import Figure

            figure = Figure(figsize=(7.0, 4.2), layout="constrained")
            draw(figure.subplots())
            figure.savefig(self.plot, dpi=150)


def require(package: str, needed_by: str) -> None:
    """Raises BenchmarkError if an optional package is missing."""
    if find_spec(package) is None:
        raise BenchmarkError(f"{needed_by} needs pip install 'draftwood[benchmarks]' (no {package})")


def console() -> Console:
    return Console(highlight=False)


def progress(items: Sequence[Item], title: str, to: Console) -> Iterable[Item]:
    """The items, with a progress bar."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=to, refresh_per_second=2, transient=True) as bar:
        yield from bar.track(items, description=title)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile, 0 to 100, linear between the two nearest ranks; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def shown(value: float | None, digits: int = 2) -> str:
    """A number for a table; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"
