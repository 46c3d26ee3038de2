"""The first metric of a report over time, with its bounds: for a terminal, and as a picture by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from draftwood_client.admin.reports import ExperimentReport
from draftwood_client.errors import ArgumentValueError

WIDTH, HEIGHT = 60, 9
"""Of a terminal plot, in characters; the middle row is "no change"."""


@dataclass(frozen=True, slots=True)
class Point:
    """A relative change at a time, with its bounds."""

    time: datetime
    change: float
    low: float
    high: float


def histories(report: ExperimentReport) -> dict[str, list[Point]]:
    """By arm, the looks that have bounds, the oldest first."""
    found: dict[str, list[Point]] = {}
    for look in report.history:
        for one in look.comparisons:
            if one.change is not None and one.low is not None and one.high is not None:
                found.setdefault(one.arm, []).append(Point(look.time, one.change, one.low, one.high))
    return {arm: points for arm, points in found.items() if len(points) > 1}


def metric_of(report: ExperimentReport) -> str:
    """The metric of the history."""
    return next((one.metric for look in report.history for one in look.comparisons), "")


def terminal_plot(points: Sequence[Point]) -> list[str]:
    """Lines: a dot for the change, a bar between its bounds. Early, wide bounds are cut at the edges."""
    last = points[-1]
    span = 2.0 * max(abs(last.low), abs(last.high), abs(last.change), 1e-3)
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    rows[HEIGHT // 2] = ["─"] * WIDTH
    for column, point in enumerate(_resampled(points)):
        for row in range(_row(point.high, span), _row(point.low, span) + 1):
            rows[row][column] = "│"
        rows[_row(point.change, span)][column] = "●"
    labels = {0: f"{span:+.1%}", HEIGHT // 2: "0%", HEIGHT - 1: f"{-span:+.1%}"}
    lines = [f"{labels.get(number, ''):>8} {''.join(row)}".rstrip() for number, row in enumerate(rows)]
    start, end = f"{points[0].time:%Y-%m-%d %H:%M}", f"{last.time:%Y-%m-%d %H:%M} UTC"
    return [*lines, f"{'':9}{start}{end:>{WIDTH - len(start)}}"]


def write_plot(report: ExperimentReport, file: Path) -> None:
    """Writes a picture; the format is that of the file's suffix.

    Raises:
        ArgumentValueError: matplotlib is missing, there is nothing to plot, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentValueError("--plot", "needs matplotlib: pip install matplotlib") from None
    found = histories(report)
    if not found:
        raise ArgumentValueError("--plot", "there are no two looks with bounds yet")
    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0.0, color="0.6", linewidth=0.8)
    for arm, points in found.items():
        times = [point.time for point in points]
        [line] = axes.plot(times, [100 * point.change for point in points], label=arm)
        bounds = [[100 * getattr(point, name) for point in points] for name in ("low", "high")]
        axes.fill_between(times, *bounds, color=line.get_color(), alpha=0.2, linewidth=0)
    limit = 200 * max(abs(bound) for points in found.values() for bound in (points[-1].low, points[-1].high))
    axes.set(ylim=(-limit, limit), ylabel=f"change of {metric_of(report)}, %", title=report.experiment.name)
    axes.legend()
    figure.autofmt_xdate()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ArgumentValueError("--plot", f"{file} cannot be written: {error}") from None


def _resampled(points: Sequence[Point]) -> list[Point]:
    """For each column, the newest point at its time."""
    start = points[0].time.timestamp()
    width = max(points[-1].time.timestamp() - start, 1e-9)
    columns, index = [], 0
    for column in range(WIDTH):
        at = start + width * column / (WIDTH - 1) + 1e-6
        while index + 1 < len(points) and points[index + 1].time.timestamp() <= at:
            index += 1
        columns.append(points[index])
    return columns


def _row(value: float, span: float) -> int:
    share = (span - min(max(value, -span), span)) / (2 * span)
    return round(share * (HEIGHT - 1))
