"""An engine on a thread of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from draftwood_service.engine.host import run_engine
from draftwood_service.engine.link import EngineEnd
from draftwood_service.engine.loaded import LoadedEngine


class EngineThread:
    """An `EngineRunner` that hosts an engine on a thread of this process."""

    def __init__(self, load: Callable[[], AbstractContextManager[LoadedEngine]], interval: float = 0.0) -> None:
        self._load = load
        self._interval = interval
        self._thread: threading.Thread | None = None

    def start(self, connection: socket.socket) -> None:
        arguments = (EngineEnd(connection), self._load, self._interval)
        self._thread = threading.Thread(target=run_engine, args=arguments, name="engine", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Whether it ended within that time; a thread that hangs in a step ends with the process."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    @property
    def end(self) -> str:
        """How it ended, for an error message."""
        return "the engine thread ended"
