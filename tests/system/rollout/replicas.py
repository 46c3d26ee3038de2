"""Replicas of the service in processes of their own, each on an address of its own, drained and replaced one by one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftwood_benchmarks.harness.servers import wait_for_address

_END_SECONDS = 60.0
"""For a replica that was told to end. Its grace is half of it."""


def free_port(hosts: Sequence[str]) -> int:
    """A port that is free on all of these addresses, at least when it was tried."""
    while True:
        with socket.socket() as tried:
            tried.bind((hosts[0], 0))
            port: int = tried.getsockname()[1]
        if all(_is_free(host, port) for host in hosts):
            return port


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind((host, port))
        except OSError:
            return False
    return True


@dataclass(slots=True)
class Replica:
    """One replica.

    Attributes:
        host, port: where it listens.
        folder: for its log.
        flags: further flags of `draftwood serve`.
        python: the interpreter that runs it.
        environment: variables added to those of this process.
    """

    host: str
    port: int
    folder: Path
    flags: tuple[str, ...]
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _log: Path = field(init=False)

    def start(self) -> None:
        """Starts it; returns when it serves. Raises ServerError."""
        self.launch()
        self.wait()

    def launch(self) -> None:
        """Starts it; returns at once."""
        name = f"{self.host}-{time.monotonic_ns()}"
        self._log = self.folder / f"{name}.log"
        where = ("--host", self.host, "--port", str(self.port), "--ready-file", str(self.folder / f"{name}.ready"))
        with self._log.open("wb") as output:
            command = [self.python, "-m", "draftwood_service", *where, "--log-level", "warning", *self.flags]
            environment = {**os.environ, **self.environment}
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def wait(self) -> None:
        """Returns when it serves. Raises ServerError."""
        assert self._process is not None
        wait_for_address(self._process, self._log.with_suffix(".ready"), self._log, 300.0)

    def drain(self) -> int:
        """Sends SIGTERM; the exit status when it has ended."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(_END_SECONDS)

    def kill(self) -> None:
        """Ends it as a lost machine would. The engine's process ends by itself, when it notices."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
