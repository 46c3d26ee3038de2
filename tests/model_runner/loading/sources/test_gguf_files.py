"""GGUF files as models: what is made of them, what cannot be read, and starts at the same time."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftwood_model_runner.errors import ModelNotFoundError, UnsupportedModelError
from draftwood_model_runner.loading import gguf as gguf_conversion
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL, KNOWN_DIGESTS
from draftwood_model_runner.loading.gguf import DENSE, UNREADABLE
from draftwood_model_runner.loading.model import load_model
from draftwood_model_runner.loading.sources import resolve
from tests.model_runner.loading.sources.gguf_files import write_gguf

RESOLVE = """
import os, sys
from pathlib import Path
from draftwood_model_runner.loading.sources import resolve
print(resolve(sys.argv[1], Path(sys.argv[2]), os.environ))
large = {"torch", "transformers", "numpy", "gguf"} & sys.modules.keys()
assert not large, large
"""


@pytest.fixture(scope="module")
def float32_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tied head written out."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "Bundled.F32.gguf", head=True)


def left(cache: Path) -> list[Path]:
    """What is in the folder of dense weights, besides the digests of files."""
    return [path for path in cache.rglob("*") if path.is_file() and path.name != KNOWN_DIGESTS]


def test_a_gguf_file_is_the_model_that_it_was_written_from(float32_file: Path, tmp_path: Path) -> None:
    folder = Path(resolve(str(float32_file), tmp_path, os.environ))
    weights, bundled = (load_file(path / "model.safetensors") for path in (folder, Path(BUNDLED_MODEL)))
    assert weights.keys() == bundled.keys()  # the head is written once
    assert all(weight.dtype == torch.bfloat16 and weight.equal(bundled[name]) for name, weight in weights.items())
    ours, theirs = (load_model(str(path), runner="torch", exact=False) for path in (folder, BUNDLED_MODEL))
    assert ours.name == "Bundled.F32"
    assert (ours.fingerprint, ours.eos_token_ids) == (theirs.fingerprint, theirs.eos_token_ids)
    chat = [{"role": "user", "content": "Where is my parcel? It's late,\n  12 days."}]
    assert ours.tokenizer.encode_chat(chat).tolist() == theirs.tokenizer.encode_chat(chat).tolist()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(float32_file.parent), tmp_path, os.environ) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_quantized_weights_are_those_that_transformers_reads(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "q8.gguf", quantized=GGMLQuantizationType.Q8_0)
    (tmp_path / "adapter_config.json").write_text("{}")  # of something else in the folder
    dense: Any = AutoModelForCausalLM.from_pretrained(resolve(str(file), tmp_path, os.environ), dtype="auto")
    (tmp_path / "adapter_config.json").unlink()
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.bfloat16)
    assert dense.dtype == torch.bfloat16
    expected = dict(read.named_parameters())
    assert all(weight.equal(expected.pop(name)) for name, weight in dense.named_parameters())
    assert not expected


@pytest.mark.parametrize("end", [30, 400_000, -1])
def test_a_truncated_file_is_named(end: int, float32_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.gguf"
    file.write_bytes(float32_file.read_bytes()[:end])
    with pytest.raises(ModelNotFoundError, match=r"short\.gguf': the GGUF file is truncated or damaged \(.+\)$"):
        resolve(str(file), tmp_path / "cache", os.environ)
    assert left(tmp_path / "cache") == []


def test_bytes_of_another_kind_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\3\4 and more")
    for path in (tmp_path / "a.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError, match=r"a\.gguf': is not a GGUF file \(it begins with b'PK"):
            resolve(str(path), tmp_path / "cache", os.environ)
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"the folder has 2 GGUF files; give one: a\.gguf, b\.gguf$"):
        resolve(str(tmp_path), tmp_path / "cache", os.environ)
    with pytest.raises(ModelNotFoundError, match=r"model 'c\.gguf': no such file$"):
        resolve("c.gguf", tmp_path / "cache", os.environ)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mistral9"}, r"cannot read architecture 'mistral9' from GGUF: .+$"),
        ({"parts": 3}, r"it is one of 3 parts; join them with llama-gguf-split --merge$"),
        ({"tokenizer": False}, r"the GGUF file has no tokenizer \(tokenizer\.ggml\.model\)$"),
    ],
)
def test_a_file_that_cannot_be_served_says_why(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "other.gguf", **options)
    with pytest.raises(UnsupportedModelError, match=message):
        resolve(str(file), tmp_path / "cache", os.environ)
    assert left(tmp_path / "cache") == []


def test_a_disk_without_space_is_named(
    float32_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    folder = tmp_path / "part" / "model"
    folder.mkdir(parents=True)
    assert gguf_conversion.main(float32_file, folder) == UNREADABLE
    assert capsys.readouterr().out.startswith("its dense weights need 4")
    assert left(tmp_path) == []


def test_a_disk_that_is_full_too_early_leaves_nothing(float32_file: Path, tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))

    command = [sys.executable, "-c", RESOLVE, str(float32_file), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 1
    assert "ModelNotFoundError: model " in done.stderr.splitlines()[-1]
    assert "too large" in done.stderr.splitlines()[-1].lower()
    assert left(tmp_path) == []


def test_a_cache_that_cannot_be_used_is_named(float32_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFoundError, match=r"file: file exists$"):
        resolve(str(float32_file), tmp_path / "file", os.environ)
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ModelNotFoundError, match=r"open must belong to the user of the service"):
        resolve(str(float32_file), tmp_path / "open", os.environ)
    with pytest.raises(ModelNotFoundError, match=r"set --model-cache-folder, and leave --no-model-cache out$"):
        resolve(str(float32_file), None, os.environ)


def test_two_starts_at_once_convert_once(float32_file: Path, tmp_path: Path) -> None:
    killed = tmp_path / DENSE / "part-killed" / "model"
    killed.mkdir(parents=True)
    (killed / "model.safetensors").write_bytes(b"half")
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", "import logging; logging.basicConfig(level='INFO')\n" + RESOLVE]
    command += [str(float32_file), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=100) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    logged = said[0][1] + said[1][1]
    assert logged.count("made dense, once") == 1
    assert sorted(path.name for path in (tmp_path / DENSE).iterdir()) == [Path(said[0][0].strip()).parent.name]
