"""`draftwood serve`: from settings to a running server. Every failure is reported as one line."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import shutil
import signal
import socket
import sys
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

import structlog
import uvloop

from draftwood_memory.errors import DraftwoodMemoryError, InvalidSettingError
from draftwood_memory.settings import check_files
from draftwood_model_runner.errors import DraftwoodError, InvalidInputError, InvalidValueError
from draftwood_model_runner.loading.sources import require_head, resolve
from draftwood_service.config import CHECK, SettingsError, as_given, read_settings, service_links
from draftwood_service.engine.process import EngineProcess, become_node
from draftwood_service.logging_config import configure_logging
from draftwood_service.settings import Settings
from draftwood_service.starting import (
    about_draft_model,
    require_driver,
    require_engine,
    require_free,
    require_writable,
    write_whole,
)
from draftwood_service.telemetry import opened_telemetry
from draftwood_strategies.registry import know_offered

if TYPE_CHECKING:
    from draftwood_service.engine.bridge import EngineBridge
    from draftwood_service.serving import ServedModel

_log = structlog.get_logger("draftwood")

_USAGE_ERROR = 2
_FAILURE = 1
_LEAVE_SECONDS = 15.0
"""For an engine that loads to end, before it is killed: mostly under a second, with vLLM some five."""


def serve(args: list[str]) -> int | None:
    """Serves until SIGTERM or SIGINT, which drain; a second SIGINT exits at once. With --check it serves nothing.

    Returns:
        The exit status: 0 after a drain, 2 for a bad setting, 1 for any other reason not to serve, among them an engine
        that died more often than it is restarted, so that its supervisor restarts it.
    """
    if any(arg == CHECK or arg.startswith(f"{CHECK}=") for arg in args):
        from draftwood_service.checking import check

        return check(args, os.environ)
    try:
        settings = read_settings(args, os.environ)
    except SettingsError as error:
        return _fail(error, _USAGE_ERROR)
    configure_logging(settings.log_level, settings.log_format)
    if links := service_links(os.environ):
        _log.info("variables of Kubernetes' service links are no settings, and are ignored", variables=links)
    try:
        _check(settings)
        settings = settings.model_copy(update=_resolved(settings))
        know_offered(settings.model_strategies)
        if settings.node_rank:
            become_node(settings)
        return uvloop.run(_serve(settings))
    except (InvalidValueError, InvalidSettingError) as error:
        return _fail(as_given(error, args, os.environ), _FAILURE)
    except (DraftwoodError, DraftwoodMemoryError) as error:
        return _fail(error, _FAILURE)


def _fail(error: Exception, status: int) -> int:
    print(f"draftwood serve: {error}", file=sys.stderr)
    return status


def _check(settings: Settings) -> None:
    """What takes no time. Raises DraftwoodError, DraftwoodMemoryError."""
    if not settings.node_rank:
        require_free("port", settings.host, settings.port)
        if settings.health_port is not None:
            require_free("health_port", settings.host, settings.health_port)
    require_head(settings.draft_head)
    require_engine(settings.engine)
    require_driver(settings.device)
    require_writable("ready_file", settings.ready_file)
    check_files(settings.of_memory)
    _copy_compiled(settings)


def _resolved(settings: Settings) -> dict[str, str]:
    """The folders or hub ids of the model, and of the one that drafts beside it, by their settings. They may first be
    downloaded and converted, which ends with this process.

    Raises:
        DraftwoodError: there is no such model, or it cannot be read.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        resolved = {"model": resolve(settings.model_path, settings.cache_folder, os.environ)}
        if settings.draft_model is not None:
            with about_draft_model(settings.draft_model):
                resolved["draft_model"] = resolve(settings.draft_model, settings.cache_folder, os.environ)
        return resolved
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


async def _serve(settings: Settings) -> int:
    starting = asyncio.create_task(_start_engine(settings))
    await asyncio.sleep(0)  # its process starts; what follows is imported meanwhile
    from draftwood_service.rpc.bound import BoundServer

    async with AsyncExitStack() as at_failure:
        at_failure.push_async_callback(_abandon, starting)
        telemetry = opened_telemetry(settings)
        at_failure.push_async_callback(telemetry.close)
        bound = BoundServer(settings, telemetry)
        at_failure.push_async_callback(bound.close)
        await bound.start()
        _warn_of_access(settings)
        _log.info("loading", address=bound.address, model=settings.model_path)
        bridge, model = await starting
        from draftwood_model_runner.runners.machine import trim_heap
        from draftwood_service.rpc.server import RunningServer

        server = RunningServer(bound, model, bridge)
        at_failure.pop_all()
    trim_heap()
    gc.freeze()  # a collection that scans all that was imported would stop all streams and health checks
    await server.start()
    ending = _stop_signals(), server.recovery.failed
    await _any(*ending, server.synced)
    if server.synced.is_set():
        _log.info("serving", address=bound.address, model=model.name, device=model.device, dtype=model.dtype)
        if settings.ready_file is not None:
            write_whole("ready_file", settings.ready_file, bound.address + "\n")
    await _any(*ending)
    await server.stop()
    return _FAILURE if server.recovery.failed.is_set() else 0


async def _any(*events: asyncio.Event) -> None:
    """Waits until one of them is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for process in waiting:
        process.cancel()


def _warn_of_access(settings: Settings) -> None:
    if settings.auth == "open":
        _log.warning("anyone who reaches the port may call, as operator", auth="open", host=settings.host)
    elif settings.has_credentials and settings.tls_cert is None and not settings.is_local:
        _log.warning("credentials travel in clear text, unless something before this server adds TLS: see --tls-cert")


def _copy_compiled(settings: Settings) -> None:
    """Copies compiled functions to where numba looks for them: it uses no folder that it cannot write to.

    Raises:
        InvalidInputError: there is nothing to copy, or no place to copy it to.
    """
    source, target = settings.compiled_functions, os.environ.get("NUMBA_CACHE_DIR")
    if source is None:
        return
    if not target:
        raise InvalidInputError("compiled_functions", source, "needs the environment variable NUMBA_CACHE_DIR")
    try:
        shutil.copytree(source, target, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise InvalidInputError("compiled_functions", source, f"cannot be copied to {target}: {error}") from None


async def _start_engine(settings: Settings) -> tuple[EngineBridge, ServedModel]:
    """Starts the engine's process before it first waits, and loads the tokenizer as soon as the engine names its class:
    this process does without torch, which is imported to find it.

    Raises:
        DraftwoodError: the model does not exist, or cannot be served.
    """
    runner = EngineProcess(settings)
    connection, theirs = socket.socketpair()
    runner.start(theirs)

    def leave(number: int, frame: object) -> None:
        """There is nothing to drain yet. Waits for the engine, which would go on to write to the terminal."""
        signal.signal(number, lambda number, frame: os._exit(128 + number))
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        runner.join(_LEAVE_SECONDS)
        runner.remove_store()
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    try:
        await asyncio.sleep(0)
        await asyncio.to_thread(_prepare, settings)  # health checks are answered meanwhile
    except BaseException:
        connection.close()
        runner.join(0.0)
        raise
    from draftwood_model_runner.loading.tokenizer import Tokenizer, load_tokenizer
    from draftwood_service.engine.bridge import EngineBridge
    from draftwood_service.rpc.grammar_trial import GrammarTrials
    from draftwood_service.serving import ServedModel

    bridge = EngineBridge(
        runner,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
    )
    class_path: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def know(signature: str) -> None:
        if not class_path.done():
            class_path.set_result(signature)

    async def named_tokenizer() -> Tokenizer:
        return await asyncio.to_thread(load_tokenizer, settings.model_path, await class_path)

    bridge.on_tokenizer = know
    loading = asyncio.create_task(named_tokenizer())
    try:
        info = await bridge.start(connection)
        tokenizer = await loading
    except BaseException:
        loading.cancel()
        await bridge.close()
        raise
    trials = GrammarTrials(tokenizer.vocabulary(info.vocab_size, info.eos_token_ids))
    atexit.register(trials.close)
    trials.prepare()
    return bridge, ServedModel(**vars(info), tokenizer=tokenizer, grammars=trials)


async def _abandon(starting: asyncio.Task[tuple[EngineBridge, ServedModel]]) -> None:
    starting.cancel()
    await asyncio.wait([starting])


def _prepare(settings: Settings) -> None:
    """Checks the tenants file, and imports what takes long. Raises InvalidInputError."""
    if settings.tenants_file is not None:
        from draftwood_tenants.file import read_file

        read_file(settings.tenants_file, settings.tenant_limits)
    import draftwood_service.rpc.server  # noqa: F401
    from draftwood_model_runner.loading.tokenizer import import_transformers
    from draftwood_service.rpc.parsing import compile_counter

    import_transformers()
    compile_counter()


def _stop_signals() -> asyncio.Event:
    """An event that is set by SIGTERM and SIGINT; a second SIGINT ends the process."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stopping.is_set():
            os._exit(128 + signal.SIGINT)
        stopping.set()

    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    return stopping
