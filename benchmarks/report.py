"""What all benchmarks share: progress, the report as JSON and as a picture, and the error that ends one."""

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

from model_runner.errors import DraftwoodError, InvalidValueError

Item = TypeVar("Item")


class BenchmarkError(DraftwoodError):
    """A measurement could not be made, or found what must not be."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where the report goes besides the terminal."""

    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.", dir_okay=False)
    ] = None
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw them here: PNG, SVG or PDF.", dir_okay=False)
    ] = None

    def check(self) -> None:
        """Raises BenchmarkError or InvalidValueError where something cannot be written, before anything is measured."""
        for flag, path in (("--json", self.json_file), ("--plot", self.plot)):
            if path is not None and not path.absolute().parent.is_dir():
                raise InvalidValueError(flag, str(path), "its folder must exist")
        if self.plot is not None:
            if self.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
                raise InvalidValueError("--plot", str(self.plot), "it must end in .png, .svg or .pdf")
            require("matplotlib", "--plot")

    def write(self, rows: Sequence[object], draw: Callable[[Any], None], **more: object) -> None:
        """Writes `{"rows": rows, **more}`, and what `draw` draws on a matplotlib Axes."""
        if self.json_file is not None:
            self.json_file.write_text(json.dumps({"rows": rows, **more}, indent=1) + "\n", encoding="utf-8")
        if self.plot is not None:
            from matplotlib.figure import Figure

            figure = Figure(figsize=(7.0, 4.2), layout="constrained")
            draw(figure.subplots())
            figure.savefig(self.plot, dpi=150)


def require(package: str, wanted_by: str) -> None:
    """Raises BenchmarkError where an optional package is missing."""
    if find_spec(package) is None:
        raise BenchmarkError(f'{wanted_by} needs {package}: pip install "draftwood[bench]"')


def console() -> Console:
    return Console(highlight=False)


def progress(items: Sequence[Item], title: str, to: Console) -> Iterable[Item]:
    """The items, with a bar that grows as they are taken."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=to, refresh_per_second=2, transient=True) as bar:
        yield from bar.track(items, description=title)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def shown(value: float | None, digits: int = 2) -> str:
    """A number for a table; "-" for none."""
    return "-" if value is None else f"{value:.{digits}f}"
