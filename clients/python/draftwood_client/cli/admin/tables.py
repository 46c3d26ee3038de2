"""Tables for people: of tenants and of experiments."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftwood.admin.v1.experiments_pb2 import Experiment, ExperimentReport
from draftwood.admin.v1.tenants_pb2 import DraftConfig, Tenant
from draftwood_client.cli.admin.fields import as_data
from draftwood_client.cli.output import VISIBLE, has_colours, print_json
from draftwood_client.convert import plain, seconds, value_of, word

_STATE_STYLES = {"running": "green", "stopped": "yellow", "concluded": "cyan"}
_ORIGINS = {"api": "API", "file": "file"}
_PIPE_WIDTH = 200
"""Columns of a table in a pipe or file, where no terminal says how wide it is."""


def console() -> Console:
    """For stdout, with colours where they are wanted."""
    colours, terminal = has_colours(sys.stdout), sys.stdout.isatty()
    return Console(
        force_terminal=colours,
        no_color=not colours,
        width=None if terminal else _PIPE_WIDTH,
        highlight=False,
        soft_wrap=False,
    )


def plain_table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines; columns in `right` are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table


def cell(value: object, style: str = "") -> Text:
    """Text of others: without markup and control characters."""
    return Text(str(value).translate(VISIBLE), style=style)


def tenants_table(tenants: list[Tenant]) -> None:
    right = ("requests/min", "tokens/min", "at once", "weight")
    table = plain_table("tenant", "from", "drafting", *right, "changed (UTC)", "description", right=right)
    for tenant in tenants:
        numbers = [*plain(tenant.quotas).values(), value_of(tenant, "weight")]
        cells = [tenant.name.removeprefix("tenants/"), _ORIGINS.get(word(tenant, "origin"), "?")]
        cells += [drafting_text(tenant.drafting), *map(_number, numbers), time_text(tenant, "update_time")]
        table.add_row(*map(cell, [*cells, tenant.description]))
    console().print(table)


def experiments_table(experiments: list[Experiment]) -> None:
    headings = ("experiment", "state", "arms", "unit", "coverage", "tenants", "started (UTC)", "winner", "description")
    table = plain_table(*headings, right=("coverage",))
    for experiment in experiments:
        state = word(experiment, "state")
        cells = [
            ", ".join(arm.id for arm in experiment.arms),
            word(experiment, "unit") or "request",
            f"{_coverage(experiment):.0%}",
            ", ".join(experiment.tenants) or "all",
            time_text(experiment, "start_time"),
            experiment.winner or "-",
            experiment.description,
        ]
        name = cell(experiment.name.removeprefix("experiments/"))
        table.add_row(name, cell(state, _STATE_STYLES.get(state, "")), *map(cell, cells))
    console().print(table)


def drafting_text(drafting: DraftConfig) -> str:
    """A strategy with its options in a line; "-" for the server's default."""
    values = plain(drafting)
    options = [f"{name}={value}" for name, value in (values["options"] or {}).items()]
    if values["max_nodes"] is not None:
        options.append(f"max_nodes={drafting.max_nodes}")
    return " ".join([drafting.strategy or ("default" if options else "-"), *options])


def _coverage(experiment: Experiment) -> float:
    return experiment.coverage if experiment.HasField("coverage") else 1.0


def time_text(message: Message, name: str) -> str:
    """A time of a message; "-" without one."""
    time = value_of(message, name)
    return "-" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"


def duration_text(duration: float) -> str:
    """Seconds as people write them, such as "5m" or "1h 30m"."""
    left, parts = round(1000 * duration), []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"


_VERDICT_STYLES = {"better": "green", "worse": "red"}


def show_report(ask: Callable[[], ExperimentReport], *, watch: float | None, as_json: bool) -> None:
    """Prints a report; with `watch`, a new one every so many seconds, until Ctrl-C."""
    if watch is None:
        _print_report(ask(), as_json)
        return
    with suppress(KeyboardInterrupt):
        while True:
            report = ask()
            if not as_json:
                console().clear()
            _print_report(report, as_json)
            time.sleep(watch)


def _print_report(report: ExperimentReport, as_json: bool) -> None:
    if as_json:
        print_json(as_data(report, zeros=True))
    else:
        console().print(rendered(report))


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
    yield Text()
    if report.sample_ratio_mismatch:
        yield Text("The units are not divided as the weights say: nothing may be concluded.", style="bold red")
    for arm in report.violations:
        stopped = f", stopped {time_text(arm, 'stop_time')} UTC" if arm.HasField("stop_time") else ""
        yield cell(f"guardrail {arm.guardrail} of {arm.arm}: {arm.reason}{stopped}", "red")
    for conclusion in report.conclusions:
        yield cell(conclusion.text)


def _heading(report: ExperimentReport) -> str:
    experiment = report.experiment
    parts = [
        f"{experiment.name.removeprefix('experiments/')}: {word(experiment, 'state')}",
        f"unit {word(experiment, 'unit') or 'request'}",
        f"{_coverage(experiment):.0%} of them",
        f"tenants {', '.join(experiment.tenants) or 'all'}",
    ]
    if experiment.HasField("start_time"):
        parts.append(f"started {time_text(experiment, 'start_time')} UTC")
    if experiment.HasField("burn_in"):
        parts.append(f"the first {duration_text(seconds(experiment.burn_in))} not counted")
    parts.append(f"{report.servers} server{'' if report.servers == 1 else 's'}")
    if experiment.winner:
        parts.append(f"winner {experiment.winner}")
    return "; ".join(parts)


def _arms(report: ExperimentReport) -> Table:
    """A column for each arm."""
    names = [row.arm for row in report.arms]
    table = plain_table("", *names, right=tuple(names))
    audited = ("audited", "differing") if any(row.audited for row in report.arms) else ()
    for count in ("units", "requests", "errors", *audited):
        table.add_row(count, *(f"{getattr(row, count):,}" for row in report.arms))
    for metric in report.metrics:
        values = [row.metrics.get(metric.key) for row in report.arms]
        if any(value is not None for value in values):
            shown = ("-" if value is None else metric_text(metric.key, value) for value in values)
            table.add_row(cell(metric.title), *shown)
    return table


def metric_text(key: str, value: float) -> str:
    """A value with its unit: keys with "seconds" are times, all others plain numbers."""
    if "seconds" not in key:
        return f"{value:.3f}"
    return f"{value:.3f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _comparisons(report: ExperimentReport) -> Table:
    table = plain_table("arm", "metric", "change", "bounds", "verdict", right=("change", "bounds"))
    titles = {metric.key: metric.title for metric in report.metrics}
    for row in report.comparisons:
        values = plain(row)
        low, high = (_percent(values[bound], "?") for bound in ("low", "high"))
        bounds = "-" if low == high == "?" else f"{low} to {high}"
        verdict = cell(values["verdict"] or "-", _VERDICT_STYLES.get(values["verdict"], ""))
        table.add_row(
            cell(row.arm), cell(titles.get(row.metric, row.metric)), _percent(values["change"], "-"), bounds, verdict
        )
    return table


def _percent(change: float | None, unknown: str) -> str:
    return unknown if change is None else f"{change:+.1%}"
