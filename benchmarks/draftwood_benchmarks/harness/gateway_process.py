"""A gateway in a process of its own, for benchmarks and tests that measure as a client."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from draftwood_benchmarks.harness.server_process import ServerError

_START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A running gateway on 127.0.0.1."""

    port: int
    pid: int

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def running_gateway(target: str, *arguments: str, most_files: int | None = None) -> Iterator[GatewayProcess]:
    """Runs `draftwood gateway` on a free port while the context lasts.

    Args:
        target: of the service.
        arguments: further flags.
        most_files: that it may open.

    Raises:
        ServerError: it ended by itself, did not answer in time, or did not stop with status 0.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "draftwood_client", "gateway", "--port", str(port), "--target", target]

    process = subprocess.Popen([*command, *arguments], stderr=subprocess.DEVNULL)
    if most_files is not None:  # by no function of `Popen` before the program runs: gRPC's threads may abort the fork
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most_files, most_files))
    try:
        _wait(f"http://127.0.0.1:{port}/health", process)
        yield GatewayProcess(port, process.pid)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    process.terminate()
    if status := process.wait(60):
        raise ServerError(f"the gateway stopped with status {status}")


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError("the gateway does not start") from None
            time.sleep(0.05)
