"""A Draftwood service in a process of its own, for benchmarks that measure what a client sees."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ServerError(Exception):
    """The service did not start; the message ends with its log's last lines."""


@contextmanager
def running_server(*arguments: str, timeout: float = 300.0) -> Iterator[str]:
    """Starts `draftwood serve` on a free local port, yields "host:port", and ends it.

    Args:
        arguments: more flags of `draftwood serve`.
        timeout: seconds until it must serve.

    Raises:
        ServerError: it ended, or was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="draftwood-") as folder:
        ready, log = Path(folder, "address"), Path(folder, "log")
        flags = ["--port", "0", "--ready-file", str(ready), "--log-level", "warning", *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-m", "service", *flags], stdout=output, stderr=output)
        try:
            yield _wait(process, ready, log, timeout)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
