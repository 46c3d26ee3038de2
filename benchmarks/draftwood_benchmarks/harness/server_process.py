"""A Draftwood service in a process of its own, for benchmarks that measure as a client."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
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
