"""Models of the hub: in a folder, by the hub's own client, from a hub that cuts off and that sends other bytes; and
whether the hub is asked."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwood_model_runner.errors import InvalidInputError, ModelNotFoundError
from draftwood_model_runner.loading.checkpoint import set_offline_mode
from draftwood_model_runner.loading.fetching import HubModel, fetch_to
from tests.model_runner.loading.http_files import FileHandler, serving

UNREACHABLE = "http://127.0.0.1:9"
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
        url: of the hub.
        asked: path and range of its requests.
        cut: bytes of the weights after which the connection is cut, once; 0 for never.
        sent: the weights, as they are sent.
    """

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, str]] = []
        self.cut = 0
        self.sent = WEIGHTS

    def handler(self) -> type[FileHandler]:
        hub = self
        info = {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
        digests = {name: hashlib.sha256(body).hexdigest() for name, body in FILES.items()}
        tree = [
            {
                "type": "file",
                "path": name,
                "size": len(body),
                "oid": "0" * 40,
                "lfs": {"oid": digests[name], "size": len(body), "pointerSize": 1},
            }
            for name, body in FILES.items()
        ]

        class Handler(FileHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.asked.append((path, self.headers.get("range", "")))
                if path == "/api/models/a/b" or path.startswith("/api/models/a/b/revision/"):
                    self.answer(200, json.dumps(info).encode())
                elif path.startswith("/api/models/a/b/tree/"):
                    self.answer(200, json.dumps(tree).encode())
                elif path.startswith(f"/a/b/resolve/{COMMIT}/"):
                    self.send(path.rpartition("/")[2])
                else:
                    self.answer(404)

            def send(self, name: str) -> None:
                headers = {"etag": f'"{digests[name]}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
                body, cut = FILES[name], 0
                if name == "model.safetensors":
                    body = hub.sent
                    if self.command == "GET":
                        cut, hub.cut = hub.cut, 0
                self.answer_range(body, headers, cut)

        return Handler

    def fetch(self, source: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """By a process of its own: the hub's client reads its settings once."""
        given = {**os.environ, "HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", FETCH, source, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, env=given, check=False)


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    with serving(made.handler()) as made.url:
        yield made


@pytest.mark.system
def test_a_download_that_was_cut_off_goes_on_and_a_complete_one_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    hub.cut = 21 << 20
    folder = tmp_path / "models" / "b"
    done = hub.fetch("a/b", folder)
    assert done.stdout == "True\n", done.stderr
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not (folder / "pytorch_model.bin").exists()
    assert not (folder / "q4.gguf").exists()
    [begin] = [asked for path, asked in hub.asked if path.endswith("model.safetensors") and asked]
    assert int(begin.removeprefix("bytes=").rstrip("-")) >= 10 << 20
    asked = len(hub.asked)
    assert hub.fetch("a/b", folder).stdout == "False\n"
    assert len(hub.asked) == asked
    assert "has a/b; take another folder" in hub.fetch("a/c", folder).stderr


@pytest.mark.system
def test_other_bytes_than_the_hubs_are_refused_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.sent = b"\0" * len(WEIGHTS)
    done = hub.fetch("a/b@v1", tmp_path)
    assert done.returncode == 1
    assert re.search(r"model 'a/b': model\.safetensors has sha256 \w+, not \w+ \(1 of 2 files\)", done.stderr)
    hub.sent = WEIGHTS
    assert hub.fetch("a/b@v1", tmp_path).stdout == "True\n"
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.system
def test_one_gguf_file_comes_alone(hub: Hub, tmp_path: Path) -> None:
    assert hub.fetch("a/b/q4.gguf", tmp_path).stdout == "True\n"
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["q4.gguf"]
    assert "has no q5.gguf" in hub.fetch("a/b/q5.gguf", tmp_path / "other").stderr
    assert "cannot be downloaded" in hub.fetch("a/none", tmp_path / "none").stderr


def test_sources_name_repository_file_and_revision(tmp_path: Path) -> None:
    assert HubModel.of("a/b") == HubModel("a/b", None, None)
    assert HubModel.of("a/b@v1.0") == HubModel("a/b", None, "v1.0")
    assert HubModel.of("a/b/x/q4.gguf@main") == HubModel("a/b", "x/q4.gguf", "main")
    for source in ("name", "a/b/c", "../a/b", "a/b@", "a/b/../c.gguf@v"):
        with pytest.raises(InvalidInputError, match="must look like org/name"):
            fetch_to(source, tmp_path)


def test_what_was_downloaded_is_used_without_the_hub(tmp_path: Path) -> None:
    environ = {"HF_ENDPOINT": UNREACHABLE, "HF_HOME": str(tmp_path)}
    with pytest.raises(ModelNotFoundError, match=r"^model 'a/b': it was not downloaded before, and http://127"):
        set_offline_mode("a/b", environ)
    assert "HF_HUB_OFFLINE" not in environ
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    set_offline_mode("a/b", environ)
    assert environ["HF_HUB_OFFLINE"] == "1"
    set_offline_mode("a/b", environ)
    with pytest.raises(ModelNotFoundError, match=r"^model 'a/c': it was not downloaded before, and HF_HUB_OFFLINE"):
        set_offline_mode("a/c", environ)


def test_a_hub_that_answers_anything_is_asked_and_a_folder_needs_none(hub: Hub, tmp_path: Path) -> None:
    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    set_offline_mode("org/other", environ)
    assert hub.asked
    set_offline_mode(str(tmp_path), {"HF_ENDPOINT": UNREACHABLE})
    assert "HF_HUB_OFFLINE" not in environ
