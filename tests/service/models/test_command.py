"""`draftwood models`: names, what is kept, and families."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from draftwood_model_runner.loading.sources.dense_weights import dense_place
from draftwood_model_runner.loading.sources.known_models import KNOWN_MODELS
from draftwood_service.models.command import models
from draftwood_service.models.families import families


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
    assert [(one["kind"], one["name"], one["bytes"]) for one in printed["kept"]] == [
        ("converted", "ab12", 500_000),
        ("dense weights", "smollm2-135m", 2_000_000),
    ]
    assert models(["--model-cache-folder", str(cache)]) == 0
    table = capsys.readouterr().out
    assert "2 hours ago" in table
    assert "2.0 MB" in table
    assert "98.4 MB" in table


def test_nothing_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("DRAFTWOOD_MODEL_CACHE_FOLDER", str(tmp_path / "none"))
    assert models(["--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["cache_folder"] == str(tmp_path / "none")
    assert (printed["kept"], printed["models"][0]["kept"]) == ([], False)


def test_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert models(["--families", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in printed["families"]] == [family.name for family in families()]
    assert models(["--families"]) == 0
    assert f"Of {len(families())} families torch serves" in capsys.readouterr().out.replace("\n", " ")
