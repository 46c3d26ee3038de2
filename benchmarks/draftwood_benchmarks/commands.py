"""`draftwood bench`: one subcommand for each question. An error is printed as one line."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import typer

from draftwood_benchmarks.harness.servers import ServerError
from draftwood_client import DraftwoodError as ClientError
from draftwood_client.cli.apps import new_app, run
from draftwood_model_runner.errors import DraftwoodError, InvalidValueError

FOR_USERS = {
    "speed": ("speed:speed", "How fast is my model, beside what I run now?"),
    "load": ("load:load", "How fast is a service with many clients?"),
    "replay": ("replay:replay_command", "What would my recorded answers gain?"),
    "never-slower": ("never_slower:never_slower", "What do drafts cost where they can't help?"),
    "lossless": ("lossless:lossless", "Are the answers of my model those of transformers?"),
}
FOR_MAINTAINERS = {
    "step": ("step:step", "Time of a forward pass by its number of tokens."),
    "gpu": ("gpu:gpu", "All that one run on a GPU tells of the cuda runner."),
}
COMMANDS = FOR_USERS | FOR_MAINTAINERS
"""Module here, function and a line of help of each subcommand: `draftwood bench --help` imports none of them."""
_STATUSES: dict[type[Exception], int] = {InvalidValueError: 2, DraftwoodError: 1, ClientError: 1, ServerError: 1}


def bench(args: list[str]) -> int:
    """The command `draftwood bench`. Returns the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return run(build_app(args), args, "bench", _STATUSES)


def build_app(args: list[str]) -> typer.Typer:
    """The app. Imports only the subcommand named by the first of `args`."""
    app = new_app(no_args_is_help=True, help="Measure speed, load and drafting.")
    for panel, commands in {"Commands": FOR_USERS, "For maintainers": FOR_MAINTAINERS}.items():
        for name, (where, line) in commands.items():
            function = _load(where) if name in args[:1] else _absent
            app.command(name, short_help=line, rich_help_panel=panel)(function)
    return app


def _load(where: str) -> Any:
    module, _, function = where.partition(":")
    return getattr(import_module(f"draftwood_benchmarks.{module}"), function)


def _absent() -> None:
    """Placeholder, in the list of subcommands, for one that is not run."""
