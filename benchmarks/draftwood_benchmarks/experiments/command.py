"""`draftwood bench experiments`: how often our A/B tests raise a false alarm, and how often they find a difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from draftwood_benchmarks.experiments.simulation import LOOKS, Looks, World, simulate
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console, shown
from draftwood_client.cli.options import command
from draftwood_service.experiments.statistics.mixture import is_rejected, quantile_change
from draftwood_service.experiments.statistics.ratios import compare
from draftwood_tenants.experiments.outcomes import TIME_PER_TOKEN, TTFT, FloatArray, Metric, column

ALPHA = 0.05
LEAST_POWER = 0.8
SPEEDUP = 1.1
SESSION_LENGTH = 2.0
AA, AB = World(session_length=SESSION_LENGTH), World(speedup=SPEEDUP)

Alarm = Callable[[Looks], NDArray[np.bool]]
"""Whether a look finds a difference: bool[run, look]."""


@dataclass(frozen=True, slots=True)
class Row:
    """Shares of the runs in which any of the looks found something; None where the case has none to find.

    Attributes:
        false_alarms: a difference was found where there is none.
        power: the difference that there is was found.
        srm_false_alarms: a sample-ratio mismatch was found, although units are assigned as the weights say.
    """

    case: str
    false_alarms: float | None
    power: float | None
    srm_false_alarms: float


@command
def experiments(
    output: OutputOptions,
    runs: Annotated[int, typer.Option(min=10, help="Simulated experiments of each case.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 0,
) -> None:
    """Error rates of A/B tests that are looked at 20 times, by simulation; status 1 if a bar is missed."""
    out = console()
    output.check()
    with out.status("A/A tests"):
        rows = false_alarms(AA, runs, seed)
    with out.status("A/B tests"):
        rows.append(power(AB, runs, seed + 1))
    out.print(_table(rows, runs))
    output.write([asdict(row) for row in rows], lambda axes: _draw(rows, axes), runs=runs, looks=LOOKS)
    if missed := [row.case for row in rows if misses(row)]:
        raise BenchmarkError(f"missed by: {', '.join(missed)}")


def misses(row: Row) -> bool:
    """Whether a row is beyond a bar."""
    too_many = max(row.false_alarms or 0.0, row.srm_false_alarms) > ALPHA
    return too_many or (row.power is not None and row.power < LEAST_POWER)


def false_alarms(world: World, runs: int, seed: int) -> list[Row]:
    """Rows of a world in which arms do not differ."""
    alarms: dict[str, Alarm] = {
        "A/A, mean TTFT": lambda looks: excludes_zero(looks, TTFT),
        "A/A, decode time per token": lambda looks: excludes_zero(looks, TIME_PER_TOKEN),
        "A/A, p90 of TTFT": _quantile_differs,
    }
    shares = found_in(world, runs, seed, {**alarms, "srm": _mismatch})
    return [Row(case, shares[case], None, shares["srm"]) for case in alarms]


def power(world: World, runs: int, seed: int) -> Row:
    """The row of a world in which the treatment writes more tokens per second."""
    shares = found_in(world, runs, seed, {"found": _is_faster, "srm": _mismatch})
    return Row(f"{world.speedup - 1:+.0%} tokens/s", None, shares["found"], shares["srm"])


def found_in(world: World, runs: int, seed: int, alarms: dict[str, Alarm]) -> dict[str, float]:
    """For each alarm the share of the runs in which any look raised it."""
    count = dict.fromkeys(alarms, 0)
    for looks in simulate(world, runs, seed):
        for name, alarm in alarms.items():
            count[name] += int(alarm(looks).any(axis=1).sum())
    return {name: raised / runs for name, raised in count.items()}


def excludes_zero(looks: Looks, metric: Metric) -> NDArray[np.bool]:
    """bool[run, look]: whether the confidence sequence of the change excludes 0."""
    low, high = compare(*_arms(looks.sums), metric).sequence(ALPHA)
    return (low > 0) | (high < 0)


def _is_faster(looks: Looks) -> NDArray[np.bool]:
    return compare(*_arms(looks.sums), TIME_PER_TOKEN).sequence(ALPHA)[1] < 0


def _quantile_differs(looks: Looks) -> NDArray[np.bool]:
    low, high = quantile_change(looks.ttft[:, :, 0], looks.ttft[:, :, 1], 0.9, ALPHA)
    return (low > 0) | (high < 0)


def _mismatch(looks: Looks) -> NDArray[np.bool]:
    return is_rejected(looks.sums[..., column("units")].sum(-1), np.array([0.5, 0.5]), ALPHA)


def _arms(sums: FloatArray) -> tuple[FloatArray, FloatArray]:
    return sums[:, :, 0], sums[:, :, 1]


def _table(rows: list[Row], runs: int) -> Table:
    table = Table(title=f"{runs:,} experiments of {AA.requests:,} requests, {LOOKS} looks each", title_justify="left")
    table.add_column("case", no_wrap=True)
    bars = (f"false alarms\n(<= {ALPHA})", f"power\n(>= {LEAST_POWER})", f"SRM false alarms\n(<= {ALPHA})")
    for heading in bars:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.case, shown(row.false_alarms, 4), shown(row.power, 3), shown(row.srm_false_alarms, 4))
    return table


def _draw(rows: list[Row], axes: Any) -> None:
    shown_rows = [row for row in rows if row.false_alarms is not None]
    axes.barh([row.case for row in shown_rows], [row.false_alarms for row in shown_rows])
    axes.axvline(ALPHA, color="grey")
    axes.set_xlabel("share of experiments with a false alarm")
