"""`draftwood top`: a live view of one or several servers, one snapshot, or a line of JSON for each sample."""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from dataclasses import asdict
from types import TracebackType
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.live import Live

from draftwood_client.cli.options import ReplicaOptions, command
from draftwood_client.cli.output import has_colours, print_json
from draftwood_client.cli.top.replicas import ReplicaWatcher
from draftwood_client.cli.top.screen import SORT_KEYS, Screen, Snapshot, Sort, snapshot
from draftwood_client.errors import ArgumentValueError

try:
    import termios
    import tty
except ImportError:  # Windows has no termios: the view works without keys
    termios = None  # type: ignore[assignment]

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
            console.print(Screen(snapshot(watcher.views()), sort=sort))
        else:
            _show(console, watcher, interval, sort)


def _print_lines(watcher: ReplicaWatcher, interval: float, once: bool, sort: Sort) -> None:
    watcher.wait_for_rates(_ONCE_SECONDS)
    while True:
        print_json(_as_json(snapshot(watcher.views()), sort))
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
    by_letter = {order[0]: order for order in Sort}
    with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        sampled_at = 0.0
        while True:
            shown = snapshot(watcher.views())
            if time.monotonic() - sampled_at >= interval:
                sampled_at = time.monotonic()
                history.append(shown.tokens_per_second)
            live.update(Screen(shown, [*history], sort, live=True), refresh=True)
            for key in keys.wait(max(interval - (time.monotonic() - sampled_at), 0.01)).lower():
                if key == "q":
                    return
                sort = by_letter.get(key, sort)


class Keys:
    """Context manager that reads single keys from the terminal, without echo; none if stdin is no terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdin.fileno() if termios is not None and sys.stdin.isatty() else None

    def __enter__(self) -> Self:
        if self._terminal is not None:
            self._settings = termios.tcgetattr(self._terminal)
            tty.setcbreak(self._terminal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._terminal is not None:
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._settings)

    def wait(self, seconds: float) -> str:
        """The keys pressed since the last call; waits for one, at most so long."""
        if self._terminal is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._terminal, 1024)
        if not pressed:
            time.sleep(seconds)  # stdin has ended: it would always be ready
        return pressed.decode(errors="ignore")
