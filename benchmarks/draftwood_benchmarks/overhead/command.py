"""`draftwood bench overhead`: what the host works in a decoding step, for each sequence, by strategy.

The engine runs in this process on a model that costs nothing (`costless`), so that what is left is its own: schedule,
draft, verify, learn. With `--scheduler`, the first of these alone, with many tenants. With `--sampling`, what it takes
to choose a token, by the size of the vocabulary. With `--growth`, all of it against vocabulary, context, prompt and
memory. A step of a real service, its messages and its text included: `draftwood bench service`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftwood_benchmarks.harness.machine import OtherLoad, warning
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console, progress
from draftwood_benchmarks.load.command import read_levels
from draftwood_benchmarks.overhead.decoding import Row, measured
from draftwood_benchmarks.overhead.growth import draw_growth, growth_table, measured_growth
from draftwood_benchmarks.overhead.sampling import draw_sampling, measured_sampling, sampling_table
from draftwood_benchmarks.overhead.scheduling import (
    SLOTS,
    WAITING_TENANTS,
    ScheduleRow,
    draw_schedule,
    measured_schedule,
    schedule_table,
)
from draftwood_client.cli.options import command
from draftwood_strategies.registry import warm_up

STRATEGIES = ("none", "trie", "hybrid")
_TARGETS_US = {"none": 20, "trie": 40, "hybrid": 60}
"""With 32 streams."""


@command
def overhead(
    output: OutputOptions,
    streams: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of sequences at once.")] = "1,32",
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Draft nodes of a sequence, at most.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="How often each case is measured; the best counts.")] = 3,
    steps: Annotated[int, typer.Option(min=10, max=900, help="Measured steps of a round.")] = 150,
    scheduler: Annotated[bool, typer.Option("--scheduler", help="Measure the scheduler alone, by slots.")] = False,
    sampling: Annotated[
        bool, typer.Option("--sampling", help="Measure sampling alone, by the size of the vocabulary.")
    ] = False,
    growth: Annotated[
        bool, typer.Option("--growth", help="Measure what grows with vocabulary, context, prompt and memory.")
    ] = False,
) -> None:
    """Microseconds of a decoding step that the model does not take, for each sequence, by strategy."""
    out = console()
    output.check()
    if scheduler:
        _measure_scheduler(output, rounds, steps, out)
        return
    if sampling:
        _measure_sampling(output, rounds, out)
        return
    if growth:
        _measure_growth(output, nodes, rounds, out)
        return
    cases = [(strategy, count) for count in read_levels(streams) for strategy in STRATEGIES]
    best: dict[tuple[str, int], Row] = {}
    for strategy in STRATEGIES:  # compiled code is loaded at its first call
        warm_up(strategy)
        with suppress(BenchmarkError):
            measured(strategy, 2, nodes, 10)
    load = OtherLoad()
    for strategy, count in progress(cases * rounds, "rounds", out):
        row = measured(strategy, count, nodes, steps)
        if (strategy, count) not in best or row.host_us < best[strategy, count].host_us:
            best[strategy, count] = row
    rows = [best[case] for case in cases]
    busy = load.share()
    out.print(_table(rows, f"Host time of a decoding step, {nodes} draft nodes at most{warning(busy)}"))
    output.write([asdict(row) for row in rows], lambda axes: _draw(axes, rows), nodes=nodes, busy=busy)


def _measure_scheduler(output: OutputOptions, rounds: int, steps: int, out: Console) -> None:
    cases = [(slots, tenants) for slots in SLOTS for tenants in WAITING_TENANTS]
    load = OtherLoad()
    best: dict[tuple[int, int], ScheduleRow] = {}
    for case in progress(cases * rounds, "rounds", out):
        row = measured_schedule(*case, steps)
        if case not in best or row.schedule_ms < best[case].schedule_ms:
            best[case] = row
    rows, busy = [best[case] for case in cases], load.share()
    out.print(schedule_table(rows, f"Scheduling of a step with more tenants than slots{warning(busy)}"))
    output.write([asdict(row) for row in rows], lambda axes: draw_schedule(axes, rows), busy=busy)


def _measure_sampling(output: OutputOptions, rounds: int, out: Console) -> None:
    load = OtherLoad()
    rows = measured_sampling(rounds)
    busy = load.share()
    out.print(sampling_table(rows, f"Choosing a token at temperature 0.6{warning(busy)}"))
    output.write([asdict(row) for row in rows], lambda axes: draw_sampling(axes, rows), busy=busy)


def _measure_growth(output: OutputOptions, nodes: int, rounds: int, out: Console) -> None:
    load = OtherLoad()
    rows = measured_growth(nodes, rounds, out)
    busy = load.share()
    out.print(growth_table(rows, f"Host time by what it may grow with{warning(busy)}"))
    output.write([asdict(row) for row in rows], lambda axes: draw_growth(axes, rows), nodes=nodes, busy=busy)


def _table(rows: list[Row], title: str) -> Table:
    table = Table(
        "strategy", "streams", "us a sequence", "target", "acceptance length", title=title, title_justify="left"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        target = f"< {_TARGETS_US[row.strategy]}" if row.streams == 32 else ""
        length = f"{row.acceptance_length:.2f}"
        table.add_row(row.strategy, str(row.streams), f"{row.host_us:.1f}", target, length)
    return table


def _draw(axes: Any, rows: list[Row]) -> None:
    axes.barh([f"{row.strategy}, {row.streams}" for row in rows], [row.host_us for row in rows])
    axes.set_xlabel("microseconds of host time for each sequence and step")
