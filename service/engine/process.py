"""The engine in a process of its own: `EngineProcess` starts it, `python -m service.engine.process FD` is it.

Knows settings, models and engines; nothing of requests.
"""

from __future__ import annotations

import gc
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from service.engine.host import EngineHost, Hosted
from service.engine.link import EngineEnd
from service.logs import configure_logging
from service.memory.opening import opened_memory
from service.serving import ModelFacts
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
            pass  # it has ended; the link says so

    def join(self, seconds: float) -> bool:
        """Kills the process where it has not ended by itself within that time."""
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
            return "the engine's process was not started"
        try:
            status: int | None = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        return f"the engine's process ended with status {status}"


def main() -> None:
    """The process: it ends with the other end of its link, which is whose it is to answer signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings: Settings = pickle.load(sys.stdin.buffer)
    configure_logging(settings.log_level, settings.log_format)
    end = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
    EngineHost(end, lambda: _hosted(settings), settings.stream_interval).run()


@contextmanager
def _hosted(settings: Settings) -> Iterator[Hosted]:
    from model_runner.engine import Engine, EngineConfig
    from model_runner.loading.model import load_model

    _warm_up_strategies()
    model = load_model(
        settings.model_path,
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
    facts = ModelFacts.of(model)
    with opened_memory(settings, facts.fingerprint) as memory:
        preload = settings.memory_preload, settings.strategy
        engine = Engine(model, config)
        gc.collect()
        gc.freeze()  # what stands now stays: a collection that looks through it stops all requests for 0.3 s
        yield Hosted(engine, memory, model.grammars, facts, *preload)


def _warm_up_strategies() -> None:
    """Compiles what strategies compile; one that fails will be switched off request by request, and say why."""
    from strategies.registry import names, warm_up

    for name in names():
        try:
            warm_up(name)
        except Exception:
            _log.exception("strategy fails", strategy=name)


if __name__ == "__main__":
    main()
