"""`draftwood bench`: the benchmarks as subcommands, and every way in which one can fail to one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from benchmarks.server_process import ServerError
from draftwood_client import DraftwoodError as ClientError
from model_runner.errors import DraftwoodError, InvalidValueError

_USAGE_ERROR = 2
_FAILURE = 1

COMMANDS = {
    "step": ("benchmarks.step:step", "What one forward pass costs, by its number of tokens."),
    "speed": ("benchmarks.speed:speed", "Tokens per second of one stream, against transformers."),
    "load": ("benchmarks.load:load", "Throughput and latency of the service at several concurrencies."),
    "share": ("benchmarks.share:share", "What a memory that replicas share costs and brings."),
    "soak": ("benchmarks.soak:soak", "Mixed traffic for a long time: nothing may grow."),
    "replay": ("benchmarks.replay:replay_command", "What drafts would have brought on recorded outputs."),
    "memory": ("benchmarks.replay_memory:memory", "What drafting and learning cost, by tokens in memory."),
}
"""Where each subcommand is and a line of help, so that a list of them need not import what they need."""


def bench(args: list[str]) -> int | None:
    """The command `draftwood bench`. Returns the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        build_app(args)(args=args, prog_name="draftwood bench")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except InvalidValueError as error:
        return _fail(error, _USAGE_ERROR)
    except (DraftwoodError, ClientError, ServerError) as error:
        return _fail(error, _FAILURE)
    return 0


def build_app(args: list[str]) -> typer.Typer:
    """The app; only the subcommand that `args` begin with is imported."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Measure speed, load and drafting.",
    )
    for name, (where, line) in COMMANDS.items():
        app.command(name, short_help=line)(_load(where) if name in args[:1] else _absent)
    return app


def _load(where: str) -> Callable[..., Any]:
    module, _, function = where.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(module), function)
    return loaded


def _absent() -> None:
    """Stands in the list of subcommands for one that is not asked for."""


def _fail(error: Exception, status: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
