"""The engine in a process of its own: `EngineProcess` starts `python -m service.engine.process FD`.

Contains nothing of requests.
"""

from __future__ import annotations

import gc
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from service.engine.host import EngineHost
from service.engine.link import EngineEnd
from service.engine.loaded import LoadedEngine
from service.logging_config import configure_logging
from service.memory.opening import opened_memory
from service.serving import ModelInfo
from service.settings import Settings

_log = structlog.get_logger("draftwood")


class EngineProcess:
    """Runs the engine of these settings in a process of its own, which ends when its link is closed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, connection: socket.socket) -> None:
        command = [sys.executable, "-P", "-m", __name__, str(connection.fileno())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[connection.fileno()])
        connection.close()
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                pickle.dump(self._settings, stdin)
        except BrokenPipeError:
            pass  # it has ended, which the closed link reports

    def join(self, seconds: float) -> bool:
        """Kills the process if it has not ended by itself within that time."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    @property
    def end(self) -> str:
        if self._process is None:
            return "the engine process was not started"
        try:
            status: int | None = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        return f"the engine process ended with status {status}"


def main() -> None:
    """Runs the engine until the service's end of the link is closed. Signals are for the service to handle."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings: Settings = pickle.load(sys.stdin.buffer)
    configure_logging(settings.log_level, settings.log_format)
    end = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
    EngineHost(end, lambda: _loaded(settings), settings.stream_interval).run()


@contextmanager
def _loaded(settings: Settings) -> Iterator[LoadedEngine]:
    began = time.perf_counter()

    def finished(step: str) -> None:
        nonlocal began
        now = time.perf_counter()
        _log.info("loading", finished=step, seconds=round(now - began, 2))
        began = now

    from model_runner.drafting.watchdog import Watchdog
    from model_runner.engine import Engine
    from model_runner.loading.model import load_model
    from model_runner.warm_up import warm_up

    finished("imports")
    _warm_up_strategies()
    finished("strategies")
    model = load_model(
        settings.model_path,
        device=settings.device,
        dtype=settings.dtype,
        max_context=settings.max_context,
        exact=settings.exact,
        runner=settings.runner,
        weights=settings.weights,
        generation_defaults=settings.generation_defaults,
    )
    finished("model")
    _log.info("runner", runner=model.runner_name, weights=model.weights, reason=model.runner_reason)
    info = ModelInfo.of(model)
    with opened_memory(settings, info.fingerprint) as memory:
        finished("memory")
        engine = Engine(model, settings.engine_config, Watchdog())
        finished("engine")
        warm_up(engine)
        finished("warm-up")
        gc.collect()
        gc.freeze()  # a collection that scans the loaded model's objects would stop all requests for 0.3 s
        yield LoadedEngine(engine, memory, model.grammars, info, settings.memory_preload, settings.strategy)


def _warm_up_strategies() -> None:
    """Runs each strategy's just-in-time compilation. One that fails is disabled request by request, with the reason."""
    from strategies.registry import strategy_names, warm_up

    for name in strategy_names():
        try:
            warm_up(name)
        except Exception:
            _log.exception("strategy cannot be compiled", strategy=name)


if __name__ == "__main__":
    main()
