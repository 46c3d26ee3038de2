"""A real service with the bundled model, and `draftwood gateway` in front of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from benchmarks.shared.server_process import running_server


@pytest.fixture(scope="session")
def gateway() -> Iterator[str]:
    """Its URL."""
    with (
        running_server("--threads", "1", "--max-running", "64", "--max-waiting", "128") as target,
        socket.socket() as one,
    ):
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        one.close()
        command = [sys.executable, "-m", "draftwood_client", "gateway", "--port", str(port), "--target", target]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(url, process)
            yield url
        finally:
            process.terminate()
            assert process.wait(30) == 0


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, "the gateway ended"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as page:
                assert json.load(page) == {"status": "ok"}
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the gateway does not answer")
