"""The output of `draftwood experiment report`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_client.admin.reports import ExperimentReport
from draftwood_client.cli.admin.fields import Data, as_data
from draftwood_client.cli.admin.plot import histories, metric_of, terminal_plot, write_plot
from draftwood_client.cli.admin.tables import cell, console, duration_text, plain_table, time_text
from draftwood_client.cli.output import print_json
from draftwood_client.protocol.convert import to_message

_VERDICT_STYLES = {"better": "green", "worse": "red"}


def show(ask: Callable[[], ExperimentReport], *, watch: float | None, plot: Path | None, as_json: bool) -> None:
    """Prints a report; with `watch`, a new one every so many seconds, until Ctrl-C."""
    if watch is not None:
        with suppress(KeyboardInterrupt):
            _watch(ask, watch, plot, as_json)
        return
    report = ask()
    if plot is not None:
        write_plot(report, plot)
    if as_json:
        print_json(_as_json(report))
    else:
        console().print(rendered(report))


def _watch(ask: Callable[[], ExperimentReport], seconds: float, plot: Path | None, as_json: bool) -> None:
    while True:
        report = ask()
        if plot is not None and histories(report):
            write_plot(report, plot)
        if as_json:
            print_json(_as_json(report))
        else:
            out = console()
            out.clear()
            out.print(rendered(report))
        time.sleep(seconds)


def _as_json(report: ExperimentReport) -> Data:
    return as_data(to_message(report, pb.ExperimentReport), zeros=True)


def rendered(report: ExperimentReport) -> RenderableType:
    """The report for people."""
    return Group(*_parts(report))


def _parts(report: ExperimentReport) -> Iterator[RenderableType]:
    yield cell(_heading(report), "bold")
    yield Text()
    yield _arms(report)
    if report.comparisons:
        yield Text()
        yield _comparisons(report)
    for arm, points in histories(report).items():
        yield Text()
        yield cell(f"{metric_of(report)} of {arm} against {report.experiment.arms[0].id}")
        yield Text("\n".join(terminal_plot(points)))
    yield Text()
    if report.sample_ratio_mismatch:
        yield Text("The units are not divided as the weights say: nothing may be concluded.", style="bold red")
    for one in report.violations:
        stopped = f", stopped {time_text(one.stop_time)} UTC" if one.stop_time else ""
        yield cell(f"guardrail {one.guardrail} of {one.arm}: {one.reason}{stopped}", "red")
    for sentence in report.conclusions:
        yield cell(sentence)


def _heading(report: ExperimentReport) -> str:
    experiment = report.experiment
    parts = [
        f"{experiment.name.removeprefix('experiments/')}: {experiment.state}",
        f"unit {experiment.unit or 'request'}",
        f"{1 if experiment.coverage is None else experiment.coverage:.0%} of them",
        f"tenants {', '.join(experiment.tenants) or 'all'}",
    ]
    if experiment.start_time is not None:
        parts.append(f"started {time_text(experiment.start_time)} UTC")
    if experiment.burn_in is not None:
        parts.append(f"the first {duration_text(experiment.burn_in)} not counted")
    parts.append(f"{report.servers} server{'' if report.servers == 1 else 's'}")
    if experiment.winner:
        parts.append(f"winner {experiment.winner}")
    return "; ".join(parts)


def _arms(report: ExperimentReport) -> Table:
    """A column for each arm."""
    names = [row.arm for row in report.arms]
    table = plain_table("", *names, right=tuple(names))
    counts = {
        "units": [row.units for row in report.arms],
        "requests": [row.requests for row in report.arms],
        "errors": [row.errors for row in report.arms],
        "audited": [row.audited for row in report.arms],
        "differing": [row.differing for row in report.arms],
    }
    for title, numbers in counts.items():
        if title in ("units", "requests", "errors") or any(row.audited for row in report.arms):
            table.add_row(title, *(f"{number:,}" for number in numbers))
    for title in _metrics(report):
        values = [row.metrics.get(title) for row in report.arms]
        table.add_row(cell(title), *("-" if value is None else metric_text(title, value) for value in values))
    return table


def _metrics(report: ExperimentReport) -> list[str]:
    """The titles in the order of the comparisons, which is that of the server; maps have none."""
    ordered = dict.fromkeys(one.metric for one in report.comparisons)
    rest = sorted({title for row in report.arms for title in row.metrics} - ordered.keys())
    present = {title for row in report.arms for title in row.metrics}
    return [title for title in (*ordered, *rest) if title in present]


def metric_text(title: str, value: float) -> str:
    """A value with its unit: titles with "time", "ttft" or "tpot" are seconds, all others plain numbers."""
    if not any(word in title.lower() for word in ("time", "ttft", "tpot")):
        return f"{value:.3f}"
    return f"{value:.3f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _comparisons(report: ExperimentReport) -> Table:
    table = plain_table("arm", "metric", "change", "bounds", "verdict", right=("change", "bounds"))
    for one in report.comparisons:
        change = "-" if one.change is None else f"{one.change:+.1%}"
        low = "?" if one.low is None else f"{one.low:+.1%}"
        high = "?" if one.high is None else f"{one.high:+.1%}"
        bounds = "-" if low == high == "?" else f"{low} to {high}"
        verdict = cell(one.verdict or "-", _VERDICT_STYLES.get(one.verdict, ""))
        table.add_row(cell(one.arm), cell(one.metric), change, bounds, verdict)
    return table
