"""`draftwood top`: the live view, one snapshot, or a line of JSON for each sample."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from draftwood_client.cli.options import ReplicaOptions, command
from draftwood_client.cli.output import has_colours, print_json
from draftwood_client.cli.top.keys import Keys
from draftwood_client.cli.top.replica_watcher import ReplicaWatcher
from draftwood_client.cli.top.screen import SORT_KEYS, Screen, Sort
from draftwood_client.cli.top.snapshot import Snapshot
from draftwood_client.errors import ArgumentValueError

_MIN_INTERVAL, _MAX_INTERVAL = 0.5, 60.0
_ONCE_SECONDS = 10.0
"""For two samples of each server. A server that answers sends them within two seconds."""
_HISTORY = 512
"""Values of the sparkline; no terminal is wider."""


@command
def top(
    connection: ReplicaOptions,
    interval: Annotated[float, typer.Option(help="Seconds between two samples, 0.5 to 60.")] = 1.0,
    sort: Annotated[Sort, typer.Option(help="Order of the tenants.")] = Sort.TOKENS,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each sample.")] = False,
) -> None:
    """Watch throughput, tenants, drafting, KV cache and store of one or several servers.

    Operators see everything, a tenant-admin sees its own tenant. Where the output is no terminal, one snapshot is
    printed.
    """
    if not _MIN_INTERVAL <= interval <= _MAX_INTERVAL:
        problem = f"{interval:g} is not allowed; it must lie in [{_MIN_INTERVAL:g}, {_MAX_INTERVAL:g}]"
        raise ArgumentValueError("interval", problem)
    console = Console(force_terminal=sys.stdout.isatty(), no_color=not has_colours(sys.stdout))
    with ReplicaWatcher(connection.targets(), connection.admin_client, interval) as watcher:
        if as_json:
            _print_lines(watcher, interval, once, sort)
        elif once or not console.is_terminal or console.is_dumb_terminal:
            watcher.wait_for_rates(_ONCE_SECONDS)
            console.print(Screen(watcher.snapshot(), sort=sort))
        else:
            _show(console, watcher, interval, sort)


def _print_lines(watcher: ReplicaWatcher, interval: float, once: bool, sort: Sort) -> None:
    watcher.wait_for_rates(_ONCE_SECONDS)
    while True:
        print_json(_as_json(watcher.snapshot(), sort))
        if once:
            return
        time.sleep(interval)


def _as_json(shown: Snapshot, sort: Sort) -> dict[str, Any]:
    """All fields; the time in ISO 8601."""
    shown.tenants.sort(key=SORT_KEYS[sort])
    return asdict(shown) | {"time": shown.time.isoformat()}


def _show(console: Console, watcher: ReplicaWatcher, interval: float, sort: Sort) -> None:
    """Until "q" is pressed, or Ctrl-C."""
    history: deque[float] = deque(maxlen=_HISTORY)
    by_letter = {one[0]: one for one in Sort}
    with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        sampled_at = 0.0
        while True:
            shown = watcher.snapshot()
            if time.monotonic() - sampled_at >= interval:
                sampled_at = time.monotonic()
                history.append(shown.tokens_per_second)
            live.update(Screen(shown, [*history], sort, live=True), refresh=True)
            for key in keys.wait(max(interval - (time.monotonic() - sampled_at), 0.01)).lower():
                if key == "q":
                    return
                sort = by_letter.get(key, sort)
