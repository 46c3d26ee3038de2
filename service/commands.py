"""`draftwood serve`: settings to a running server, and every way in which that can fail to one line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvloop

from model_runner.errors import DraftwoodError
from service.config import SettingsError, read_settings
from service.logs import configure_logging
from service.settings import Settings

if TYPE_CHECKING:
    from service.bridge import StepEngine
    from service.serving import ServedModel

_log = structlog.get_logger("draftwood")

_USAGE_ERROR = 2
_FAILURE = 1


def serve(args: list[str]) -> int | None:
    """Serves until SIGTERM or SIGINT, which drain; a second SIGINT exits at once.

    Returns:
        The exit status: 0 after a drain, 2 for a bad setting, 1 for anything else that keeps it from serving.
    """
    try:
        settings = read_settings(args, os.environ)
    except SettingsError as error:
        return _fail(error, _USAGE_ERROR)
    configure_logging(settings.log_level, settings.log_format)
    try:
        return uvloop.run(_serve(settings))
    except DraftwoodError as error:
        return _fail(error, _FAILURE)


def _fail(error: DraftwoodError, status: int) -> int:
    print(f"draftwood serve: {error}", file=sys.stderr)
    return status


async def _serve(settings: Settings) -> int:
    from service.server import BoundServer, RunningServer

    bound = BoundServer(settings)
    # Until there is something to drain, signals end the process as they end any other.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    model, make_engine = _load(settings)
    server = RunningServer(bound, model, make_engine)
    await server.start()
    stopping = _stop_signals()
    _log.info("serving", address=bound.address, model=model.name, device=model.device, dtype=model.dtype)
    if settings.ready_file is not None:
        _write_whole(settings.ready_file, bound.address + "\n")
    await stopping.wait()
    await server.stop()
    return 0


def _load(settings: Settings) -> tuple[ServedModel, Callable[[], StepEngine]]:
    """The model, and what makes its engine."""
    from model_runner.engine import Engine, EngineConfig
    from model_runner.loading import BUNDLED_MODEL, load_model

    _warm_up_strategies()
    model = load_model(
        BUNDLED_MODEL if settings.model is None else settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_context=settings.max_context,
        exact=settings.exact,
    )
    config = EngineConfig(
        max_running=settings.max_running,
        max_draft_nodes=settings.max_draft_nodes,
        prefill_chunk=settings.prefill_chunk,
        shared_prefill_chunk=settings.shared_prefill_chunk,
        kv_cache_tokens=settings.kv_cache_tokens,
        prefix_cache=settings.prefix_cache,
        tenant_weights=settings.tenant_weights,
        threads=settings.threads,
    )
    return model, lambda: Engine(model, config)


def _warm_up_strategies() -> None:
    """Compiles what strategies compile; one that fails will be switched off request by request, and say why."""
    from strategies.registry import names, warm_up

    for name in names():
        try:
            warm_up(name)
        except Exception:
            _log.exception("strategy fails", strategy=name)


def _stop_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set; SIGINT after that ends the process."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stopping.is_set():
            os._exit(128 + signal.SIGINT)
        stopping.set()

    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    return stopping


def _write_whole(path: Path, text: str) -> None:
    """Writes a file that is never seen half-written."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
