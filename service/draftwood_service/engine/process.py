"""Starts the engine in a process of its own: `EngineProcess` runs `python -m draftwood_service.engine.main FD NAME`.

Imports little, so that the other process starts before this one imports the rest of the service.
"""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

from draftwood_service.settings import Settings


class EngineRunner(Protocol):
    """Where the engine runs: `process.EngineProcess`; tests run it on a thread."""

    def start(self, connection: socket.socket) -> None:
        """Starts the engine at the other end of `connection` and takes over the socket; returns at once."""

    def join(self, seconds: float) -> bool:
        """Waits until the engine has ended after the link was closed, and kills it if that is possible. Blocks.

        Returns:
            Whether it ended by itself within `seconds`.
        """

    @property
    def end(self) -> str:
        """How it ended, for an error message."""


def become_node(settings: Settings) -> NoReturn:
    """Runs in the place of this process what computes for the leader of several nodes."""
    given = os.memfd_create("settings")
    os.write(given, pickle.dumps(settings))
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "draftwood_service.engine.vllm.node"])


def temporary_store(name: str) -> Path:
    """The folder of the store that an engine process of this name runs where the settings name none. It outlives the
    process, for the next one of the name."""
    return Path(tempfile.gettempdir(), f"draftwood-{name}")


class EngineProcess:
    """Runs the engine of these settings in a process of its own, which ends when its link is closed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = secrets.token_hex(8)  # of all processes that it starts, one after another
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.remove_store)

    def start(self, connection: socket.socket) -> None:
        command = [sys.executable, "-P", "-m", "draftwood_service.engine.main", str(connection.fileno())]
        command.append(self._name)
        # In a process group of its own: Ctrl-C is for the service to handle, also before the engine ignores it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[connection.fileno()], process_group=0
        )
        connection.close()
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                pickle.dump(self._settings, stdin)
        except BrokenPipeError:
            pass  # it has ended, which the closed link reports

    def join(self, seconds: float) -> bool:
        """Kills the process if it has not ended by itself within that time, and what it started and left."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        with suppress(ProcessLookupError):  # its group is gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return ended

    def remove_store(self) -> None:
        """Removes the temporary store, when no other process is to be started. One that ends by itself because the
        service has ended does so as well."""
        shutil.rmtree(temporary_store(self._name), ignore_errors=True)

    @property
    def end(self) -> str:
        if self._process is None:
            return "the engine process was not started"
        try:
            status: int | None = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        return f"the engine process ended with status {status}"
