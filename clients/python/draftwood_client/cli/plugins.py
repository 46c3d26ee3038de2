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
from typing import Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand

from draftwood_client.cli.options import FAILURE, one_line_errors

GROUP = "draftwood.commands"


class KnownCommand(NamedTuple):
    """A command of one of Draftwood's other distributions.

    Attributes:
        help: so that `draftwood --help` need not import the command.
        install: what pip installs it with.
    """

    help: str
    install: str


_SERVER, _BENCHMARKS = "draftwood", "'draftwood[benchmarks]'"
KNOWN = {
    "serve": KnownCommand("Serve a model.", _SERVER),
    "gateway": KnownCommand("Serve the API of OpenAI over HTTP, in front of a service.", "'draftwood[gateway]'"),
    "key": KnownCommand("Create, list and revoke API keys of a server's file.", _SERVER),
    "models": KnownCommand("List, describe and download models by name.", _SERVER),
    "demo": KnownCommand(
        "Compare drafting off, with an empty and with a warm memory, on the bundled model.", _BENCHMARKS
    ),
    "bench": KnownCommand("Measure speed, load and drafting.", _BENCHMARKS),
}
_OURS = frozenset({"draftwood", "draftwood-benchmarks"})
"""The distributions that add them."""


class PassThrough(TyperCommand):
    """Parses nothing: `Context.args` contains all arguments after the command's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def mount(app: typer.Typer, groups: Mapping[str, typer.Typer]) -> None:
    """Adds all installed entry points to `app`, or to one of its `groups`, without importing them, and hidden commands
    that name what to install for those of Draftwood that are missing.
    """
    taken = _names(app)
    installed = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    installed = [entry for entry in installed if entry.name not in taken]
    for entry_point in installed:
        owner = _distribution(entry_point)
        known = KNOWN.get(entry_point.name) if owner in _OURS else None
        parent, name = _place(app, groups, entry_point.name)
        if name in _names(parent):
            continue
        parent.command(
            name,
            cls=PassThrough,
            help=known.help if known else f"From the package {owner}.",
            rich_help_panel="Server" if known else "Plugins",
        )(_runner(entry_point))
    for full_name in KNOWN.keys() - {entry.name for entry in installed}:
        parent, name = _place(app, groups, full_name)
        parent.command(name, cls=PassThrough, hidden=True)(_absent(full_name))


def _place(app: typer.Typer, groups: Mapping[str, typer.Typer], name: str) -> tuple[typer.Typer, str]:
    """Where the command of an entry point belongs, and its name there."""
    group, _, rest = name.partition(".")
    return (groups[group], rest) if rest and group in groups else (app, name)


def _names(app: typer.Typer) -> set[str]:
    """Of the commands and groups of `app`."""
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    return commands | {str(group.name) for group in app.registered_groups}


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
        command = f"`{_spoken(name)}` needs pip install {KNOWN[name].install}"
        _fail(f"{command}, or where no index has that, a checkout of Draftwood: docs/install.md there")

    return run


def _load(entry_point: EntryPoint) -> Callable[[list[str]], int | None]:
    """The command. Prints one line and exits if it or one of its dependencies cannot be imported."""
    try:
        command: Callable[[list[str]], int | None] = entry_point.load()
    except (ImportError, AttributeError) as error:
        owner = _distribution(entry_point)
        problem = f"`{_spoken(entry_point.name)}` ({entry_point.value}) cannot be imported: {error}"
        if place := _other_package(entry_point, error):
            package = entry_point.module.partition(".")[0]
            problem += f"; the package {package!r} that Python finds is {place}, which is not the one of {owner}"
        elif owner in _OURS and isinstance(error, ModuleNotFoundError):
            problem += f"; the installation of {owner} lacks it"
        _fail(problem)
    return command


def _other_package(entry_point: EntryPoint, error: ImportError | AttributeError) -> str:
    """Where the entry point's package was found, if it is a package of the same name that lacks the command."""
    package, _, module = entry_point.module.partition(".")
    lacks_module = isinstance(error, ImportError) and (error.name or "").startswith(f"{package}.{module}")
    if not module or not (lacks_module or isinstance(error, AttributeError)):
        return ""
    other = sys.modules.get(package)
    return ", ".join(getattr(other, "__path__", [])) or str(getattr(other, "__file__", None) or "")


def _fail(problem: str) -> NoReturn:
    typer.echo(f"error: {problem}", err=True)
    raise typer.Exit(FAILURE)


def _distribution(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else "?"
