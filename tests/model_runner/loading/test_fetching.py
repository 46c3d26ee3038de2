"""Models of the hub in a folder: by the hub's own client, from a hub that cuts off and that sends other bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from draftwood_model_runner.errors import InvalidInputError, ModelNotFoundError
from draftwood_model_runner.loading.fetching import HubModel, fetch_to

COMMIT = "c" * 40
WEIGHTS = os.urandom(24 << 20)
"""More than the client holds before it writes to its file."""
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"x",
    "q4.gguf": b"GGUF" + WEIGHTS[:99],
}
FETCH = """
import sys
from pathlib import Path
from draftwood_model_runner.errors import ModelNotFoundError
from draftwood_model_runner.loading.fetching import fetch_to
try:
    print(fetch_to(sys.argv[1], Path(sys.argv[2])))
except ModelNotFoundError as error:
    sys.exit(str(error))
"""


class Hub:
    """A hub with one model, a/b.

    Attributes:
        asked: method, path and range of its requests.
        cut: bytes of the weights after which the connection is cut, once; 0 for never.
        sent: the files, as they are sent.
    """

    def __init__(self) -> None:
        hub = self
        self.asked: list[tuple[str, str, str]] = []
        self.cut = 0
        self.sent = dict(FILES)

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.asked.append((self.command, path, self.headers.get("range", "")))
                if path == "/api/models/a/b" or path.startswith("/api/models/a/b/revision/"):
                    self.answer(json.dumps(hub.info()).encode())
                elif path.startswith("/api/models/a/b/tree/"):
                    self.answer(json.dumps(hub.tree()).encode())
                elif path.startswith(f"/a/b/resolve/{COMMIT}/"):
                    self.send(path.rpartition("/")[2])
                else:
                    self.send_error(404)

            def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
                self.send_response(status)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def send(self, name: str) -> None:
                body, etag = hub.sent[name], f'"{hashlib.sha256(FILES[name]).hexdigest()}"'
                begin = int((re.findall(r"bytes=(\d+)-", self.headers.get("range", "")) or ["0"])[0])
                headers = {"etag": etag, "x_repo_commit": COMMIT, "accept_ranges": "bytes"}
                if begin:
                    headers["content_range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
                if self.command == "GET" and name == "model.safetensors" and hub.cut:
                    cut, hub.cut = hub.cut, 0
                    self.send_response(200)
                    for key, value in {"content-length": str(len(body)), **headers}.items():
                        self.send_header(key.replace("_", "-"), value)
                    self.end_headers()
                    self.wfile.write(body[:cut])
                    self.close_connection = True
                    return
                self.answer(body[begin:], 206 if begin else 200, **headers)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def info(self) -> dict[str, Any]:
        return {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "path": name,
                "size": len(body),
                "oid": "0" * 40,
                "lfs": {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 1},
            }
            for name, body in FILES.items()
        ]

    def fetch(self, source: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """By a process of its own: the hub's client reads its settings once."""
        given = {**os.environ, "HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **variables}
        command = [sys.executable, "-c", FETCH, source, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=given, check=False)


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.system
def test_a_download_that_was_cut_off_goes_on_and_a_complete_one_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    hub.cut = 21 << 20
    folder = tmp_path / "models" / "b"
    done = hub.fetch("a/b", folder)
    assert done.stdout == "True\n", done.stderr
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not (folder / "pytorch_model.bin").exists()
    assert not (folder / "q4.gguf").exists()
    ranges = [asked for _, path, asked in hub.asked if path.endswith("model.safetensors") and asked]
    assert len(ranges) == 1
    assert int(ranges[0].removeprefix("bytes=").rstrip("-")) >= 10 << 20
    asked = len(hub.asked)
    assert hub.fetch("a/b", folder).stdout == "False\n"
    assert len(hub.asked) == asked
    assert "has a/b; take another folder" in hub.fetch("a/c", folder).stderr


@pytest.mark.system
def test_other_bytes_than_the_hubs_are_refused_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.sent["model.safetensors"] = b"\0" * len(WEIGHTS)
    done = hub.fetch("a/b@v1", tmp_path)
    assert done.returncode == 1
    assert re.search(r"model 'a/b': model\.safetensors has sha256 \w+, not \w+ \(1 of 2 files\)", done.stderr)
    hub.sent["model.safetensors"] = WEIGHTS
    assert hub.fetch("a/b@v1", tmp_path).stdout == "True\n"
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.system
def test_one_gguf_file_comes_alone(hub: Hub, tmp_path: Path) -> None:
    assert hub.fetch("a/b/q4.gguf", tmp_path).stdout == "True\n"
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["q4.gguf"]
    assert "has no q5.gguf" in hub.fetch("a/b/q5.gguf", tmp_path / "other").stderr
    assert "cannot be downloaded" in hub.fetch("a/none", tmp_path / "none").stderr


@pytest.mark.parametrize("source", ["name", "a/b/c", "../a/b", "a/b@", "a/b/../c.gguf@v"])
def test_other_sources_are_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="must look like org/name"):
        fetch_to(source, tmp_path)


def test_sources_name_repository_file_and_revision() -> None:
    assert HubModel.of("a/b") == HubModel("a/b", None, None)
    assert HubModel.of("a/b@v1.0") == HubModel("a/b", None, "v1.0")
    assert HubModel.of("a/b/x/q4.gguf@main") == HubModel("a/b", "x/q4.gguf", "main")
    with pytest.raises(ModelNotFoundError, match="has no checkpoint"):
        HubModel.of("a/b").wanted(["x.gguf"])
