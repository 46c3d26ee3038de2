from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from draftwood_model_runner.errors import ModelNotFoundError
from draftwood_model_runner.loading.checkpoint import set_offline_mode

UNREACHABLE = "http://127.0.0.1:9"


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


def test_a_hub_that_answers_anything_is_asked_and_a_folder_needs_none(tmp_path: Path) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Hub) as hub:
        Thread(target=hub.handle_request, daemon=True).start()
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
        set_offline_mode("a/b", environ)
    set_offline_mode(str(tmp_path), {"HF_ENDPOINT": UNREACHABLE})
    assert "HF_HUB_OFFLINE" not in environ
