"""The `draftwood` command line: the client's commands here, the server's by entry point (see `plugins`)."""

from __future__ import annotations

from typing import Annotated

import typer

from draftwood_client.cli import chat, commands, memory_commands, plugins, top
from draftwood_client.cli.admin import experiment_commands, tenant_commands
from draftwood_client.cli.apps import new_app
from draftwood_client.connection import package_version


def main() -> None:
    """Runs the command of `sys.argv`, for the console script (see `draftwood_command`)."""
    build_app()(prog_name="draftwood")


def build_app() -> typer.Typer:
    """The app, with the commands that are installed now."""
    app = new_app(no_args_is_help=True)
    app.callback()(_root)
    for function in (chat.chat, commands.complete, commands.info, commands.tokenize, commands.detokenize):
        app.command()(function)
    app.add_typer(memory_commands.app, name="memory")
    app.command()(commands.audit)
    app.command()(top.top)
    app.add_typer(tenant_commands.app, name="tenant")
    experiment = experiment_commands.group()
    app.add_typer(experiment, name="experiment")
    plugins.mount(app, {"experiment": experiment})
    return app


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"draftwood {package_version()}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Lossless speculative decoding as a gRPC service."""
