"""A real service with the bundled model, and `draftwood gateway` in front of it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from draftwood_benchmarks.shared.server_process import running_server
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.model_runner.loading.templates import HERMES


@pytest.fixture(scope="session")
def gateway() -> Iterator[str]:
    """Its URL."""
    with _gateway("--max-running", "64", "--max-waiting", "128") as url:
        yield url


@pytest.fixture(scope="session")
def gateway_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one whose model has a chat template with tools, though it was never trained on them."""
    folder = tmp_path_factory.mktemp("tools") / "draftwood-demo"
    shutil.copytree(BUNDLED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(HERMES, encoding="utf-8")
    with _gateway("--model", str(folder)) as url:
        yield url


@contextmanager
def _gateway(*flags: str) -> Iterator[str]:
    with running_server("--threads", "1", *flags) as target, socket.socket() as one:
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
