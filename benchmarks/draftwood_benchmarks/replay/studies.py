"""Studies by replay: acceptance length by decoding length and branch length, and by capacity of the memory.

Decoding length (draft nodes per step) and branch length (depth of the deepest draft) are the terms of the Lookahead
paper, https://arxiv.org/abs/2312.12728.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from draftwood_benchmarks.replay.replay import replay
from draftwood_benchmarks.replay.trace import Recording
from draftwood_strategies import create

DECODING_LENGTHS = (4, 8, 16, 32, 64, 128)
BRANCH_LENGTHS = (2, 4, 8, 16, 32, 64)
CAPACITIES = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000)
"""Tokens of memory."""

Grid = list[list[float]]
"""Acceptance lengths, indexed [branch length][decoding length]."""


def grid_of(strategy: str, options: dict[str, object], recordings: Sequence[Recording]) -> Grid:
    """Acceptance length for each of `BRANCH_LENGTHS` and `DECODING_LENGTHS`."""
    return [
        [
            replay(create(strategy, **options, branch_length=branch), recordings, nodes).acceptance_length
            for nodes in DECODING_LENGTHS
        ]
        for branch in BRANCH_LENGTHS
    ]


def capacity_curve(
    strategy: str, options: dict[str, object], recordings: Sequence[Recording], budget: int
) -> list[float]:
    """Acceptance length for each of `CAPACITIES`, with `budget` draft nodes per step."""
    return [
        replay(create(strategy, **options, capacity_tokens=tokens), recordings, budget).acceptance_length
        for tokens in CAPACITIES
    ]


def study(
    console: Console,
    strategy: str,
    options: dict[str, object],
    traces: dict[str, list[Recording]],
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Runs both studies on every trace, prints them, and writes them to the files that are given."""
    grids: dict[str, Grid] = {}
    curves: dict[str, list[float]] = {}
    for name in track(list(traces), description="studying", console=console, transient=True):
        grids[name] = grid_of(strategy, options, traces[name])
        curves[name] = capacity_curve(strategy, options, traces[name], 64)
        console.print(_grid_table(name, grids[name]))
    console.print(_capacity_table(curves))
    if json_file is not None:
        figures = {
            "decoding_lengths": DECODING_LENGTHS,
            "branch_lengths": BRANCH_LENGTHS,
            "grids": grids,
            "capacities": CAPACITIES,
            "capacity_curves": curves,
        }
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    if plot is not None:
        plot_studies(grids, curves, plot)


def _grid_table(name: str, grid: Grid) -> Table:
    table = Table(title=f"{name}: tokens per step")
    table.add_column("branch length \\ nodes", justify="right")
    for nodes in DECODING_LENGTHS:
        table.add_column(str(nodes), justify="right")
    for branch, line in zip(BRANCH_LENGTHS, grid, strict=True):
        table.add_row(str(branch), *(f"{value:.2f}" for value in line))
    return table


def _capacity_table(curves: dict[str, list[float]]) -> Table:
    table = Table(title="tokens per step at 64 nodes, by capacity of the memory in tokens")
    table.add_column("trace")
    for capacity in CAPACITIES:
        table.add_column(f"{capacity // 1000}k", justify="right")
    for name, curve in curves.items():
        table.add_row(name, *(f"{value:.2f}" for value in curve))
    return table


def plot_studies(grids: dict[str, Grid], curves: dict[str, list[float]], path: Path) -> None:
    """A heat map per trace, and the curves of capacity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * (len(grids) + 1), 3.8), layout="constrained")
    panels = figure.subplots(1, len(grids) + 1, squeeze=False)[0]
    for axes, (name, grid) in zip(panels[:-1], grids.items(), strict=True):
        axes.imshow(grid, cmap="viridis", origin="lower", aspect="auto")
        axes.set_xticks(range(len(DECODING_LENGTHS)), [str(n) for n in DECODING_LENGTHS])
        axes.set_yticks(range(len(BRANCH_LENGTHS)), [str(n) for n in BRANCH_LENGTHS])
        axes.set_xlabel("decoding length (nodes)")
        axes.set_ylabel("branch length")
        axes.set_title(f"{name}: tokens per step", fontsize=9)
        bright = (min(map(min, grid)) + 2 * max(map(max, grid))) / 3
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                colour = "black" if value > bright else "white"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=7)
    for name, curve in curves.items():
        panels[-1].plot(CAPACITIES, curve, marker=".", label=name)
    panels[-1].set_xscale("log")
    panels[-1].set_xlabel("capacity of the memory (tokens)")
    panels[-1].set_ylabel("tokens per step at 64 nodes")
    panels[-1].legend(fontsize=7)
    figure.savefig(path, dpi=90)
