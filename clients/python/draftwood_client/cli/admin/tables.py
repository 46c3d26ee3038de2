"""Tables for people: of tenants and of experiments."""

from __future__ import annotations

import sys
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftwood_client.admin.resources import DraftConfig, Experiment, QuotaConfig, Tenant
from draftwood_client.cli.output import VISIBLE, has_colours

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
    for one in tenants:
        quotas = one.quotas or QuotaConfig()
        numbers = [quotas.requests_per_minute, quotas.tokens_per_minute, quotas.concurrency, one.weight]
        cells = [one.name.removeprefix("tenants/"), _ORIGINS.get(one.origin, "?"), drafting_text(one.drafting)]
        table.add_row(*map(cell, [*cells, *map(_number, numbers), time_text(one.update_time), one.description]))
    console().print(table)


def experiments_table(experiments: list[Experiment]) -> None:
    right = ("coverage",)
    headings = ("experiment", "state", "arms", "unit", "coverage", "tenants", "started (UTC)", "winner", "description")
    table = plain_table(*headings, right=right)
    for one in experiments:
        cells = [
            ", ".join(arm.id for arm in one.arms),
            one.unit or "request",
            f"{1 if one.coverage is None else one.coverage:.0%}",
            ", ".join(one.tenants) or "all",
            time_text(one.start_time),
            one.winner or "-",
            one.description,
        ]
        name = cell(one.name.removeprefix("experiments/"))
        table.add_row(name, cell(one.state, _STATE_STYLES.get(one.state, "")), *map(cell, cells))
    console().print(table)


def drafting_text(drafting: DraftConfig | None) -> str:
    """A strategy with its options in a line; "-" for the server's default."""
    if drafting is None:
        return "-"
    options = [f"{name}={value}" for name, value in (drafting.options or {}).items()]
    if drafting.max_nodes is not None:
        options.append(f"max_nodes={drafting.max_nodes}")
    return " ".join([drafting.strategy or ("default" if options else "-"), *options])


def time_text(time: datetime | None) -> str:
    return "-" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"


def duration_text(seconds: float) -> str:
    """Such as "5m" or "1h 30m"."""
    left, parts = round(1000 * seconds), []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"
