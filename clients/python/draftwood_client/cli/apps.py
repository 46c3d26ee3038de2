"""Apps of commands, all with the same help and the same ends, whichever package they are in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer


def new_app(**settings: Any) -> typer.Typer:
    """A typer app without commands, with further settings of typer."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


def run(app: typer.Typer, args: list[str], name: str, failures: Mapping[type[Exception], int] | None = None) -> int:
    """Runs a command that `plugins` has mounted. Returns its exit status.

    Args:
        name: what stands behind `draftwood` in its help.
        failures: the exit status of each type of error that is printed as one line; the first that fits counts.
    """
    failures = failures or {}
    try:
        app(args=args, prog_name=f"draftwood {name}")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except tuple(failures) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        return next(status for kind, status in failures.items() if isinstance(error, kind))
    return 0
