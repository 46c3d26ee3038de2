"""Commands that other installed packages, such as the server, add to `draftwood`.

An entry point of the group "draftwood.commands" adds the command of its name; "experiment.replay" adds `replay` to the
client's group `experiment`. The client's own commands cannot be replaced. The entry point is a callable
`command(args: list[str]) -> int | None`. It receives all arguments after the command's name, `--help` included, and
returns the exit status; None means 0. For a typer app that is one line: `app(args=args, prog_name="draftwood NAME")`.
It is imported when it runs and not before, so that `draftwood --help` is fast and works if dependencies of the command
are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from draftwood_client.cli.options import FAILURE, one_line_errors

GROUP = "draftwood.commands"
SERVER = "draftwood"
"""The server's distribution."""

HELP = {
    "serve": "Serve a model.",
    "gateway": "Serve the API of OpenAI over HTTP, in front of a service.",
    "key": "Create, list and revoke API keys of a server's file.",
    "demo": "Compare drafting off, with an empty and with a warm memory, on the bundled model.",
    "bench": "Measure speed, load and drafting.",
    "experiment.replay": "Tokens per step of several strategies over the same recorded answers.",
}
"""Help of the server's commands, so that `draftwood --help` need not import them."""


class PassThrough(TyperCommand):
    """Parses nothing: `Context.args` contains all arguments after the command's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def mount(app: typer.Typer, groups: Mapping[str, typer.Typer]) -> None:
    """Adds all installed entry points to `app`, or to one of its `groups`, without importing them, and the server's
    commands if it is missing.
    """
    taken = _names(app)
    found = sorted((one for one in entry_points(group=GROUP) if one.name not in taken), key=lambda one: one.name)
    for entry_point in found:
        owner = _distribution(entry_point)
        ours = owner == SERVER
        parent, name = _place(app, groups, entry_point.name)
        if name in _names(parent):
            continue
        parent.command(
            name,
            cls=PassThrough,
            help=HELP.get(entry_point.name, "") if ours else f"From the package {owner}.",
            rich_help_panel="Server" if ours else "Plugins",
        )(_runner(entry_point))
    for full_name in HELP.keys() - {one.name for one in found}:
        parent, name = _place(app, groups, full_name)
        parent.command(name, cls=PassThrough, hidden=True)(_absent(full_name))


def _place(app: typer.Typer, groups: Mapping[str, typer.Typer], name: str) -> tuple[typer.Typer, str]:
    """Where the command of an entry point belongs, and its name there."""
    group, _, rest = name.partition(".")
    return (groups[group], rest) if rest and group in groups else (app, name)


def _names(app: typer.Typer) -> set[str]:
    """Of the commands and groups of `app`."""
    commands = {one.name or getattr(one.callback, "__name__", "") for one in app.registered_commands}
    return commands | {str(one.name) for one in app.registered_groups}


def _spoken(name: str) -> str:
    """As people type it."""
    return f"draftwood {name.replace('.', ' ')}"


def _runner(entry_point: EntryPoint) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        with one_line_errors():
            raise typer.Exit(_load(entry_point)(context.args) or 0)

    return run


def _absent(name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        _fail(f"`{_spoken(name)}` needs the server: pip install {SERVER}")

    return run


def _load(entry_point: EntryPoint) -> Callable[[list[str]], int | None]:
    """The command. Prints one line and exits if it or one of its dependencies cannot be imported."""
    try:
        command: Callable[[list[str]], int | None] = entry_point.load()
    except (ImportError, AttributeError) as error:
        problem = f"`{_spoken(entry_point.name)}` ({entry_point.value}) cannot be imported: {error}"
        if place := _other_package(entry_point, error):
            package = entry_point.module.partition(".")[0]
            problem += f"; the package {package!r} that Python finds is {place}, which is not the one of {SERVER}"
        elif _distribution(entry_point) == SERVER and isinstance(error, ModuleNotFoundError):
            problem += f"; reinstall the server: pip install {SERVER}"
        _fail(problem)
    return command


def _other_package(entry_point: EntryPoint, error: ImportError | AttributeError) -> str:
    """Where the entry point's package was found, if it is a package of the same name that lacks the command."""
    package, _, module = entry_point.module.partition(".")
    lacks_module = isinstance(error, ImportError) and (error.name or "").startswith(f"{package}.{module}")
    if not module or not (lacks_module or isinstance(error, AttributeError)):
        return ""
    found = sys.modules.get(package)
    return ", ".join(getattr(found, "__path__", [])) or str(getattr(found, "__file__", None) or "")


def _fail(problem: str) -> NoReturn:
    typer.echo(f"error: {problem}", err=True)
    raise typer.Exit(FAILURE)


def _distribution(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else "?"
