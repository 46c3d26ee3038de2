"""What runs in the engine's process: loads the engine, and hosts it until the service has ended.

Imports little before it runs: vLLM imports this module in each of its processes, and its CPU build looks into all that
is imported there, which cffi's modules break.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from draftwood_service.engine.loaded import LoadedEngine
    from draftwood_service.settings import Settings

_LOADING = {"draftwood": "draftwood_service.engine.loading", "vllm": "draftwood_service.engine.vllm.loading"}
"""By engine, the module with the function `loaded`, which loads it."""
_LOOK_SECONDS = 0.5
"""Polling interval for the end of loading, while the link is watched."""
_END_SECONDS = 30.0
"""For an engine that loads to end once the service has."""


def main() -> None:
    """Runs the engine until the service's end of the link is closed. Signals are for the service to handle."""
    atexit.register(_leave)  # as the first, so that it runs last
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings: Settings = pickle.load(sys.stdin.buffer)
    from draftwood_service.engine.host import run_engine
    from draftwood_service.engine.link import EngineEnd, ServiceEnded, TokenizerFound
    from draftwood_service.logging_config import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    connection = socket.socket(fileno=int(sys.argv[1]))
    with suppress(ServiceEnded):  # may come before `run_engine` catches it, or after
        loaded = _end_with_service(connection)
        end = EngineEnd(connection)
        gc.disable()  # until the engine is loaded: what is imported stays, and collections take a tenth of the time

        def tell(class_path: str) -> None:
            end.send(TokenizerFound(class_path))

        def load() -> AbstractContextManager[LoadedEngine]:
            loading: Any = import_module(_LOADING[settings.engine])
            return _until_loaded(loading.loaded(settings, end.interrupt, sys.argv[2], tell), loaded)

        run_engine(end, load, settings.stream_interval)


@contextmanager
def _until_loaded(loading: AbstractContextManager[LoadedEngine], loaded: threading.Event) -> Iterator[LoadedEngine]:
    try:
        with loading as engine:
            loaded.set()
            yield engine
    finally:
        loaded.set()


def _end_with_service(connection: socket.socket) -> threading.Event:
    """Until the event is set, raises ServiceEnded in the main thread when the service has ended.

    An engine that runs reads the link; one that loads does not, and vLLM loads for minutes.
    """
    from draftwood_service.engine.link import ServiceEnded

    loaded, due = threading.Event(), threading.Event()
    gone = select.poll()
    gone.register(connection, select.POLLRDHUP)

    def stop(*signal_and_frame: object) -> None:
        if not loaded.is_set():
            raise ServiceEnded

    def ignored(raised: sys.UnraisableHookArgs) -> None:
        """It met a destructor or callback, which cannot raise."""
        if issubclass(raised.exc_type, ServiceEnded):
            due.set()
        else:
            sys.__unraisablehook__(raised)

    signal.signal(signal.SIGUSR1, stop)
    sys.unraisablehook = ignored

    def watch() -> None:
        while not gone.poll(1000 * _LOOK_SECONDS):
            if loaded.is_set():
                return
        due.set()
        kill_at = time.monotonic() + _END_SECONDS
        while not loaded.is_set():
            if due.wait(_LOOK_SECONDS):
                due.clear()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            elif time.monotonic() > kill_at:
                os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="draftwood-service", daemon=True).start()
    return loaded


def _leave() -> None:
    """Ends the process at once. To free what was imported would take a second, and Triton reports frozen objects, which
    are not freed, as leaks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
