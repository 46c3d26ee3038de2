"""Tables for people: of tenants and of experiments."""

from __future__ import annotations

import sys
from typing import Any

from google.protobuf.duration_pb2 import Duration
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftwood.admin.v1 import experiments_pb2, tenants_pb2
from draftwood_client.cli.admin.fields import as_data
from draftwood_client.cli.output import VISIBLE, has_colours

_STATE_STYLES = {"running": "green", "stopped": "yellow", "concluded": "cyan"}
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


def tenants_table(tenants: list[tenants_pb2.Tenant]) -> None:
    right = ("requests/min", "tokens/min", "at once", "weight")
    table = plain_table("tenant", "from", "drafting", *right, "changed (UTC)", "description", right=right)
    for one in tenants:
        quotas = one.quotas
        numbers = [
            _number(quotas, "requests_per_minute"),
            _number(quotas, "tokens_per_minute"),
            _number(quotas, "concurrency"),
            _number(one, "weight"),
        ]
        cells = [one.name.removeprefix("tenants/"), _origin(one.origin), drafting_text(one.drafting), *numbers]
        table.add_row(*map(cell, [*cells, time_text(one, "update_time"), one.description]))
    console().print(table)


def experiments_table(experiments: list[experiments_pb2.Experiment]) -> None:
    right = ("coverage",)
    headings = ("experiment", "state", "arms", "unit", "coverage", "tenants", "started (UTC)", "winner", "description")
    table = plain_table(*headings, right=right)
    for one in experiments:
        state = state_text(one.state)
        cells = [
            ", ".join(arm.id for arm in one.arms),
            "session" if one.unit == experiments_pb2.EXPERIMENT_UNIT_SESSION else "request",
            f"{one.coverage if one.HasField('coverage') else 1:.0%}",
            ", ".join(one.tenants) or "all",
            time_text(one, "start_time"),
            one.winner or "-",
            one.description,
        ]
        name = cell(one.name.removeprefix("experiments/"))
        table.add_row(name, cell(state, _STATE_STYLES.get(state, "")), *map(cell, cells))
    console().print(table)


def drafting_text(drafting: tenants_pb2.DraftConfig) -> str:
    """A strategy with its options in a line; "-" for the server's default."""
    data: dict[str, Any] = as_data(drafting)
    options = [f"{name}={value}" for name, value in data.get("options", {}).items()]
    if "maxNodes" in data:
        options.append(f"max_nodes={data['maxNodes']}")
    return " ".join([data.get("strategy", "default" if options else "-"), *options])


def state_text(state: int) -> str:
    """In small letters, such as "running"; the number of a state that this client does not know."""
    known = experiments_pb2.ExperimentState.DESCRIPTOR.values_by_number.get(state)
    return str(state) if known is None else known.name.removeprefix("EXPERIMENT_STATE_").lower()


def time_text(message: Any, field: str) -> str:
    return f"{getattr(message, field).ToDatetime():%Y-%m-%d %H:%M:%S}" if message.HasField(field) else "-"


def duration_text(duration: Duration) -> str:
    """Such as "5m" or "1h 30m"."""
    left, parts = duration.ToMilliseconds(), []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"


def _number(message: Any, field: str) -> str:
    if not message.HasField(field):
        return "-"
    value: float = getattr(message, field)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _origin(origin: int) -> str:
    names: dict[int, str] = {tenants_pb2.RESOURCE_ORIGIN_API: "API", tenants_pb2.RESOURCE_ORIGIN_FILE: "file"}
    return names.get(origin, "?")
