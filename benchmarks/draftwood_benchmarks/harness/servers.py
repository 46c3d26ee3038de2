"""A Draftwood service in a process of its own, for benchmarks that measure as a client."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


class ServerError(Exception):
    """The service did not start, or did not stop with status 0. The message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running service.

    Attributes:
        target: "host:port".
        pid: process id.
        log: file with its output; deleted when the service has ended.
    """

    target: str
    pid: int
    log: Path


@contextmanager
def running_server(*arguments: str, timeout: float = 300.0) -> Iterator[str]:
    """Like `server_process`, but yields "host:port"."""
    with server_process(*arguments, timeout=timeout) as server:
        yield server.target


@contextmanager
def server_process(
    *arguments: str,
    timeout: float = 300.0,
    environment: Mapping[str, str] = MappingProxyType({}),
    python: str = sys.executable,
) -> Iterator[ServerProcess]:
    """Runs `draftwood serve` on a free local port while the context lasts.

    Args:
        arguments: further flags of `draftwood serve`.
        timeout: seconds until it must be ready.
        environment: variables added to those of this process.
        python: the interpreter that runs it.

    Raises:
        ServerError: the service ended by itself, was not ready in time, or did not stop with status 0.
    """
    with tempfile.TemporaryDirectory(prefix="draftwood-") as folder:
        ready, log = Path(folder, "address"), Path(folder, "log")
        flags = ["--port", "0", "--ready-file", str(ready), "--log-level", "warning"]
        flags += ["--own-text-tokens", "0"]  # an idle engine would write beside what is measured
        with log.open("wb") as output:
            process = subprocess.Popen(
                [python, "-m", "draftwood_service", *flags, *arguments],
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
            )
        try:
            yield ServerProcess(wait_for_address(process, ready, log, timeout), process.pid, log)
        except BaseException:
            _end(process)
            raise
        if status := _end(process):
            raise ServerError(f"the service stopped with status {status}\n{log_tail(log)}")


def _end(process: subprocess.Popen[bytes]) -> int:
    """Sends SIGTERM, and SIGKILL after 60 seconds; returns the exit status."""
    process.terminate()
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def wait_for_address(process: subprocess.Popen[bytes], ready: Path, log: Path, timeout: float) -> str:
    """The address that a starting service writes to the file `ready`. Raises ServerError."""
    deadline = time.monotonic() + timeout
    while not ready.exists():
        if process.poll() is not None:
            raise ServerError(f"the service ended with status {process.returncode}\n{log_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"the service was not ready within {timeout:g} s\n{log_tail(log)}")
        time.sleep(0.05)
    return ready.read_text(encoding="utf-8").strip()


def log_tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


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
def running_gateway(
    target: str | Mapping[str, str], *arguments: str, most_files: int | None = None
) -> Iterator[GatewayProcess]:
    """Runs `draftwood gateway` on a free port while the context lasts.

    Args:
        target: of the service; or those of several models' services, by their names.
        arguments: further flags.
        most_files: that it may open.

    Raises:
        ServerError: it ended by itself, did not answer in time, or did not stop with status 0.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "draftwood_client", "gateway", "--port", str(port)]
    command += ["--target", target] if isinstance(target, str) else [f"--server={m}={to}" for m, to in target.items()]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.DEVNULL)
    if most_files is not None:  # by no function of `Popen` before the program runs: gRPC's threads may abort the fork
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most_files, most_files))
    try:
        _wait(f"http://127.0.0.1:{port}/health", process)
        yield GatewayProcess(port, process.pid)
    except BaseException:
        _end(process)
        raise
    if status := _end(process):
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
