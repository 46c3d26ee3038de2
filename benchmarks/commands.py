"""`draftwood bench`: the benchmarks as subcommands. An error is printed as one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from benchmarks.shared.server_process import ServerError
from draftwood_client import DraftwoodError as ClientError
from model_runner.errors import DraftwoodError, InvalidValueError

_USAGE_ERROR = 2
_FAILURE = 1

COMMANDS = {
    "step": ("benchmarks.step:step", "Time of one forward pass by its number of tokens."),
    "gpu": ("benchmarks.gpu.command:gpu", "All that one run on a GPU tells of the cuda runner."),
    "kernels": ("benchmarks.kernels.command:kernels", "The kernels for GPUs, compiled and interpreted without one."),
    "speed": ("benchmarks.speed.command:speed", "Tokens per second of one stream, against transformers."),
    "lossless": ("benchmarks.lossless:lossless", "Greedy answers that differ from transformers', by how little."),
    "load": ("benchmarks.load.command:load", "Throughput and latency of a service at several concurrencies."),
    "quality": ("benchmarks.quality:quality", "What 8-bit weights cost in likelihood of held-out text."),
    "gateway": ("benchmarks.gateway:gateway", "What the gateway costs in tokens per second."),
    "telemetry": ("benchmarks.telemetry:telemetry", "What metrics, traces and logs cost."),
    "overhead": ("benchmarks.overhead:overhead", "What a step of a service takes beside the model."),
    "share": ("benchmarks.share.command:share", "Cost and gain of a memory that replicas share."),
    "rollout": ("benchmarks.rollout.command:rollout", "A rolling restart of replicas under load."),
    "experiments": ("benchmarks.experiments.command:experiments", "Error rates of A/B tests, by simulation."),
    "auth": ("benchmarks.auth:auth", "What authentication costs a call."),
    "abuse": ("benchmarks.abuse.command:abuse", "What one caller's attacks cost the others."),
    "leak": (
        "benchmarks.leak.command:leak",
        "What packet sizes and times tell of an answer.",
    ),
    "soak": ("benchmarks.soak.command:soak", "Mixed traffic for a long time, to find leaks."),
    "replay": ("benchmarks.replay.command:replay_command", "Acceptance length of a strategy on recorded outputs."),
    "memory": ("benchmarks.replay.memory:memory", "Time and size of a strategy by tokens in memory."),
}
"""Module, function and a line of help of each subcommand: `draftwood bench --help` imports none of them."""


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
    """The app. Imports only the subcommand named by the first of `args`."""
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
    """Placeholder, in the list of subcommands, for one that is not run."""


def _fail(error: Exception, status: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
