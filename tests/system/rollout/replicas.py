"""Replicas of the service in processes of their own, each on an address of its own, drained and replaced one by one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from draftwood_benchmarks.harness.servers import ServerError, server_process


def free_port(hosts: Sequence[str]) -> int:
    """A port that is free on all of these addresses, at least when it was tried."""
    while True:
        with ExitStack() as taken, suppress(OSError):
            port = 0
            for host in hosts:
                tried = taken.enter_context(socket.socket())
                tried.bind((host, port))
                port = tried.getsockname()[1]
            return port


@dataclass(slots=True)
class Replica:
    """One replica.

    Attributes:
        flags: further flags of `draftwood serve`.
        options: further arguments of `server_process`.
    """

    host: str
    port: int
    flags: tuple[str, ...]
    options: Mapping[str, Any]
    _running: ExitStack = field(default_factory=ExitStack, init=False)
    _pid: int | None = field(default=None, init=False)

    def start(self) -> None:
        """Returns when it serves. Raises ServerError."""
        where = ("--host", self.host, "--port", str(self.port))
        self._pid = self._running.enter_context(server_process(*self.flags, *where, **self.options)).pid

    def drain(self) -> None:
        """Sends SIGTERM; returns when it has ended. Raises ServerError: not with status 0."""
        self._running.close()

    def kill(self) -> None:
        """Ends it as a lost machine would. The engine's process ends by itself, when it notices."""
        assert self._pid is not None
        os.kill(self._pid, signal.SIGKILL)
        with suppress(ServerError):
            self._running.close()
