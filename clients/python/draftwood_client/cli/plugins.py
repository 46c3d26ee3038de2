"""Commands that other installed packages, such as the server, add to `draftwood`.

An entry point of the group "draftwood.commands" names a callable `command(args: list[str]) -> int | None`. It receives
all arguments after the command's name, `--help` included, and returns the exit status; None means 0. For a typer app
that is one line: `app(args=args, prog_name="draftwood NAME")`. It is imported when it runs and not before, so that
`draftwood --help` is fast and works if dependencies of the command are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand

from draftwood_client.cli.options import FAILURE, one_line_errors

GROUP = "draftwood.commands"
OWN_DISTRIBUTION = "draftwood"

HELP = {
    "serve": "Serve a model.",
    "demo": "Compare drafting off, with an empty and with a warm memory, on the bundled model.",
    "bench": "Measure speed, load and drafting.",
}
"""Help of our own commands, so that `draftwood --help` need not import them."""


class PassThrough(TyperCommand):
    """Parses nothing: `Context.args` contains all arguments after the command's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def mount(app: typer.Typer) -> None:
    """Adds all installed entry points to `app` without importing them."""
    for entry_point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        owner = _distribution(entry_point)
        ours = owner == OWN_DISTRIBUTION
        app.command(
            entry_point.name,
            cls=PassThrough,
            help=HELP.get(entry_point.name, "") if ours else f"From the package {owner}.",
            rich_help_panel="Server" if ours else "Plugins",
        )(_runner(entry_point))


def _runner(entry_point: EntryPoint) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        with one_line_errors():
            raise typer.Exit(_load(entry_point)(context.args) or 0)

    return run


def _load(entry_point: EntryPoint) -> Callable[[list[str]], int | None]:
    """The command. Prints one line and exits if it or one of its dependencies is not installed."""
    try:
        command: Callable[[list[str]], int | None] = entry_point.load()
    except (ImportError, AttributeError) as error:
        name = f"`draftwood {entry_point.name}`"
        if _distribution(entry_point) == OWN_DISTRIBUTION and isinstance(error, ModuleNotFoundError):
            typer.echo(f'{name} needs the server: pip install "draftwood[server]" ({error})', err=True)
        else:
            typer.echo(f"error: {name} ({entry_point.value}) cannot be imported: {error}", err=True)
        raise typer.Exit(FAILURE) from error
    return command


def _distribution(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else "?"
