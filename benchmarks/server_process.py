"""A Draftwood service in a process of its own, for benchmarks that measure what a client sees."""

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
    """The service did not start, or did not end as it should; the message ends with its log's last lines."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A service that is running.

    Attributes:
        target: "host:port".
        pid: its process.
        log: what it wrote, until it ends.
    """

    target: str
    pid: int
    log: Path


@contextmanager
def running_server(*arguments: str, timeout: float = 300.0) -> Iterator[str]:
    """As `server_process`; yields "host:port"."""
    with server_process(*arguments, timeout=timeout) as server:
        yield server.target


@contextmanager
def server_process(
    *arguments: str, timeout: float = 300.0, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[ServerProcess]:
    """Starts `draftwood serve` on a free local port, and ends it with the context.

    Args:
        arguments: more flags of `draftwood serve`.
        timeout: seconds until it must serve.
        environment: variables beside those of this process.

    Raises:
        ServerError: it ended, was not ready in time, or did not end with status 0 when it was asked to.
    """
    with tempfile.TemporaryDirectory(prefix="draftwood-") as folder:
        ready, log = Path(folder, "address"), Path(folder, "log")
        flags = ["--port", "0", "--ready-file", str(ready), "--log-level", "warning", *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "service", *flags],
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
            )
        try:
            yield ServerProcess(_wait(process, ready, log, timeout), process.pid, log)
        except BaseException:
            _end(process)
            raise
        if status := _end(process):
            raise ServerError(f"the service ended with status {status} when it was asked to end\n{_tail(log)}")


def _end(process: subprocess.Popen[bytes]) -> int:
    """Asks the process to end, and ends it where it does not; returns its status."""
    process.terminate()
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _wait(process: subprocess.Popen[bytes], ready: Path, log: Path, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    while not ready.exists():
        if process.poll() is not None:
            raise ServerError(f"the service ended with status {process.returncode}\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"the service was not ready within {timeout:g} s\n{_tail(log)}")
        time.sleep(0.05)
    return ready.read_text(encoding="utf-8").strip()


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
