"""`draftwood models`: the names that `--model` knows, what is kept, and a model by its name."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from draftwood_model_runner.loading.gguf import dense_place
from draftwood_model_runner.loading.sources import KNOWN_MODELS
from draftwood_service.models import models


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Dense weights of a known model, used two hours ago; a converted model; and what is not an entry."""
    known = KNOWN_MODELS["smollm2-135m"]
    dense = dense_place(tmp_path, known.gguf_sha256, known.name)
    for folder, name, size in ((dense, "config.json", 2_000_000), (tmp_path / "ab12", "facts.json", 500_000)):
        folder.mkdir(parents=True)
        (folder / name).write_bytes(bytes(size))
    (tmp_path / "dense" / "part-x" / "model").mkdir(parents=True)
    (tmp_path / "dense" / "part-x" / "model" / "config.json").touch()
    (tmp_path / "own-text-1-2.npy").touch()
    os.utime(dense, (time.time() - 7300,) * 2)
    return tmp_path


def test_names_and_what_is_kept(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models(["--model-cache-folder", str(cache), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    [known] = printed["models"]
    assert (known["name"], known["license"], known["kept"]) == ("smollm2-135m", "Apache-2.0", True)
    assert [(entry["kind"], entry["name"], entry["bytes"]) for entry in printed["kept"]] == [
        ("converted", "ab12", 500_000),
        ("dense weights", "smollm2-135m", 2_000_000),
    ]
    assert models(["--model-cache-folder", str(cache)]) == 0
    table = capsys.readouterr().out
    assert "2 hours ago" in table
    assert "2.0 MB" in table
    assert "98.4 MB" in table


def test_a_model_by_its_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--model-cache-folder", str(cache)]
    assert models(["smollm2-135m", *folder]) == 0
    text = capsys.readouterr().out
    assert "SmolLM2 135M Instruct" in text
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in text
    assert models(["smollm2-135m", "--download", "--json", *folder]) == 0  # it is kept, so nothing is asked
    assert json.loads(capsys.readouterr().out)["kept"] is True


def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_MODEL_CACHE_FOLDER", str(tmp_path / "none"))
    for name, value in (("HF_HOME", str(tmp_path)), ("HF_HUB_OFFLINE", "1"), ("PIP_NO_INDEX", "1")):
        monkeypatch.setenv(name, value)
    for args, status, problem in (
        (["nosuch"], 2, "must be one of smollm2-135m"),
        (["--download"], 2, "name"),
        (["smollm2-135m", "--download"], 1, "HF_HUB_OFFLINE forbids to ask the hub"),
    ):
        assert models(args) == status
        assert problem in capsys.readouterr().err
    assert models(["--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["cache_folder"] == str(tmp_path / "none")
    assert (printed["kept"], printed["models"][0]["kept"]) == ([], False)
