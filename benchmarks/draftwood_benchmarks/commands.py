"""`draftwood bench`: the benchmarks as subcommands. An error is printed as one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from draftwood_benchmarks.harness.servers import ServerError
from draftwood_client import DraftwoodError as ClientError
from draftwood_client.cli.apps import new_app, run
from draftwood_model_runner.errors import DraftwoodError, InvalidValueError

COMMANDS = {
    "step": ("step:step", "Time of one forward pass by its number of tokens."),
    "gpu": ("gpu:gpu", "All that one run on a GPU tells of the cuda runner."),
    "speed": ("speed:speed", "Tokens per second of one stream, against transformers."),
    "lossless": ("lossless:lossless", "Greedy answers that differ from transformers', by how little."),
    "load": ("load:load", "Throughput and latency of a service at several concurrencies."),
    "never-slower": ("never_slower:never_slower", "What drafting costs where it can bring nothing."),
    "quality": ("lossless:quality", "What quantized weights cost in likelihood of held-out text."),
    "ab": ("ab:ab", "Two services that differ in some settings, in turn."),
    "overhead": ("overhead:overhead", "What the host works in a step, by strategy."),
    "share": ("share:share", "Cost and gain of a memory that replicas share."),
    "replay": ("replay.command:replay_command", "Acceptance length of a strategy on recorded outputs."),
    "memory": ("replay.command:memory", "Time and size of a strategy by tokens in memory."),
}
"""Module here, function and a line of help of each subcommand: `draftwood bench --help` imports none of them."""


_STATUSES: dict[type[Exception], int] = {InvalidValueError: 2, DraftwoodError: 1, ClientError: 1, ServerError: 1}


def bench(args: list[str]) -> int:
    """The command `draftwood bench`. Returns the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return run(build_app(args), args, "bench", _STATUSES)


def build_app(args: list[str]) -> typer.Typer:
    """The app. Imports only the subcommand named by the first of `args`."""
    app = new_app(no_args_is_help=True, help="Measure speed, load and drafting.")
    for name, (where, line) in COMMANDS.items():
        app.command(name, short_help=line)(_load(where) if name in args[:1] else _absent)
    return app


def _load(where: str) -> Callable[..., Any]:
    module, _, function = where.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(f"draftwood_benchmarks.{module}"), function)
    return loaded


def _absent() -> None:
    """Placeholder, in the list of subcommands, for one that is not run."""
