"""Converted models that are kept for the next start: when one is used, and that it is the same model."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.loading import checkpoint as file_digests
from draftwood_model_runner.loading import conversion_cache
from draftwood_model_runner.loading.conversion_cache import entry_of, save_entry
from draftwood_model_runner.loading.loaded import LoadedModel, load_module
from draftwood_model_runner.loading.model import BUNDLED_MODEL, load_model
from draftwood_model_runner.runners.openvino import factory
from draftwood_model_runner.runners.openvino.factory import trial_logits
from tests.model_runner.runners.openvino.bfloat16 import needs_bfloat16

HIT = """
import sys
from pathlib import Path
from draftwood_model_runner.loading.model import load_model
load_model(sys.argv[1], cache=Path(sys.argv[2]), threads=1)
assert "torch" in sys.modules
assert not {"transformers.modeling_utils", "openvino.frontend.pytorch"} & sys.modules.keys()
"""


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every model that is loaded from its checkpoint."""
    made: list[str] = []

    def counted(path: str, *args: Any) -> Any:
        made.append(path)
        return load_module(path, *args)

    monkeypatch.setattr("draftwood_model_runner.loading.model.load_module", counted)
    return made


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A cache with the bundled model, and the model's logits."""
    cache = tmp_path_factory.mktemp("converted") / "cache"
    return cache, logits(load_model(cache=cache))


def logits(model: LoadedModel) -> Any:
    return trial_logits(model.factory.runner, model.vocab_size, model.max_context)


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [("float32", "as-is"), pytest.param("bfloat16", "as-is", marks=needs_bfloat16), ("float32", "int4")],
)
def test_the_second_start_has_the_same_model_without_the_checkpoint(
    dtype: str, weights: str, tmp_path: Path, conversions: list[str]
) -> None:
    cache = tmp_path / "cache"
    first, second = (load_model(dtype=dtype, weights=weights, cache=cache) for _ in range(2))
    assert len(conversions) == 1
    for field in fields(LoadedModel):
        if field.name not in ("factory", "tokenizer", "grammars"):
            assert getattr(first, field.name) == getattr(second, field.name), field.name
    assert first.factory.kv_bytes_per_token == second.factory.kv_bytes_per_token
    assert np.array_equal(logits(first), logits(second))


def test_a_model_in_the_cache_needs_no_modelling_code(tmp_path: Path) -> None:
    load_model(cache=tmp_path / "cache", threads=1)
    command = [sys.executable, "-c", HIT, BUNDLED_MODEL, str(tmp_path / "cache")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("file", "damage"),
    [("model.bin", "flipped"), ("facts.json", "flipped"), ("model.xml", "cut"), ("trial.npy", "missing")],
)
def test_a_damaged_entry_is_written_anew(
    file: str,
    damage: str,
    converted: tuple[Path, Any],
    tmp_path: Path,
    conversions: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(converted[0], cache)
    [path] = cache.glob(f"*/{file}")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    path.write_bytes(content if damage == "flipped" else content[:middle])
    if damage == "missing":
        path.unlink()
    written = load_model(cache=cache)
    assert len(conversions) == 1
    assert "is not used" in caplog.text
    assert np.array_equal(logits(written), converted[1])
    load_model(cache=cache)
    assert len(conversions) == 1


def test_an_entry_that_computes_else_is_not_used(
    tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(factory, "trial_logits", lambda *args: np.nextafter(trial_logits(*args), np.float32(9)))
        load_model(cache=tmp_path)
    load_model(cache=tmp_path)
    assert len(conversions) == 2


def test_another_model_or_version_and_other_options_have_other_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(folder: Path, **options: Any) -> Path:
        found = entry_of(tmp_path / "cache", str(folder), **options)
        assert found is not None
        return found

    model = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, model)
    before = place(model, threads=1)
    assert place(Path(BUNDLED_MODEL), threads=1) == before
    assert place(model, threads=2) != before
    assert place(model, threads=1, dtype="bfloat16") != before
    versions = {package: version(package) for package in conversion_cache._PACKAGES}
    for package in ("torch", "transformers", "openvino"):
        with monkeypatch.context() as patched:
            patched.setattr(conversion_cache, "version", (versions | {package: "0"}).__getitem__)
            assert place(model, threads=1) != before, package
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert place(model, threads=1) != before


def test_only_a_private_folder_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    made = tmp_path / "one" / "two"
    assert entry_of(made, BUNDLED_MODEL) is not None
    assert made.stat().st_mode & 0o077 == 0
    made.chmod(0o777)
    assert entry_of(made, BUNDLED_MODEL) is None
    assert "no other may write to it" in caplog.text
    (tmp_path / "file").touch()
    assert entry_of(tmp_path / "file" / "cache", BUNDLED_MODEL) is None


def test_what_a_folder_does_not_hold_whole_and_a_model_of_torch_are_not_kept(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(BUNDLED_MODEL, model)
    (model / "adapter_config.json").write_text("{}")
    assert entry_of(cache, str(model)) is None
    assert entry_of(cache, "org/name") is None
    load_model(runner="torch", cache=cache)
    assert not [*cache.glob("*/")]


def test_the_entries_that_were_not_used_for_longest_make_room(tmp_path: Path) -> None:
    model = load_model(runner="openvino")
    folders = [tmp_path / f"{number:032x}" for number in range(5)]
    for number, folder in enumerate(folders[:4]):
        assert save_entry(folder, model)
        os.utime(folder, (number, number))
    of_one = sum(file.stat().st_size for file in folders[0].iterdir())
    (tmp_path / "dense").mkdir()
    os.utime(folders[0])
    converted: Any = model.factory
    assert save_entry(folders[4], model, 2 * of_one + factory.file_bytes(converted))
    assert {path.name for path in tmp_path.iterdir()} == {"dense", *(folders[number].name for number in (0, 3, 4))}


def test_a_model_that_is_larger_than_the_cache_removes_nothing(
    converted: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(converted[0], cache)
    before = sorted(cache.iterdir())
    load_model(cache=cache, max_context=64, cache_bytes=1000)
    assert "not kept, so the next start converts it again: it takes 0.0 GB, and model_cache_bytes is" in caplog.text
    assert sorted(cache.iterdir()) == before


def test_a_disk_without_space_costs_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert load_model(cache=tmp_path).runner_name == "openvino"
    assert "has room for 0.0 GB" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} <= {"digests.json"}


LIMITED = """
import resource, sys
from pathlib import Path
from draftwood_model_runner.loading.model import load_model
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
print(load_model(sys.argv[1], cache=Path(sys.argv[2]), threads=1).runner_name)
"""


def test_a_file_that_cannot_be_written_whole_leaves_no_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, BUNDLED_MODEL, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["openvino"], result.stderr
    assert result.stderr.count("the converted model is not kept") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"digests.json"}


def test_a_content_that_was_digested_before_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    digested = file_digests._digest

    def counted(file: Path) -> str:
        read.append(file.name)
        return digested(file)

    monkeypatch.setattr(file_digests, "_digest", counted)
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text(file.name)
    known = file_digests.KnownDigests(tmp_path / "known")
    monkeypatch.setattr(file_digests, "_SETTLED_NS", 10**18)
    first = known.digest(files)
    assert known.digest(files) == first  # both are too new to be remembered
    assert read == ["a", "b"] * 2
    monkeypatch.setattr(file_digests, "_SETTLED_NS", 0)
    assert {known.digest(files) for _ in range(3)} == {first}
    assert read == ["a", "b"] * 3
    status = files[0].stat()
    while files[0].stat().st_ctime_ns == status.st_ctime_ns:  # the clock of the file system has coarse ticks
        files[0].write_text("c")
        os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert known.digest(files) != first
    assert read == [*["a", "b"] * 3, "a"]
    (tmp_path / "known").write_text("{")
    files[0].write_text("a")
    assert known.digest(files) == first


def test_the_model_is_compiled_once_for_the_number_of_threads_that_is_served_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []
    compiling = factory._compile

    def counted(model: Any, dtype: str, threads: int) -> Any:
        compiled.append(threads)
        return compiling(model, dtype, threads)

    monkeypatch.setattr(factory, "_compile", counted)
    for _ in range(2):
        load_model(cache=tmp_path, threads=2).factory.runner(64, 2)
    assert compiled == [2, 2, 2]  # to convert it, and each time that it is read


def test_digests_of_a_folder_that_others_may_write_to_are_not_believed(tmp_path: Path) -> None:
    file, known = tmp_path / "model.gguf", file_digests.KnownDigests(tmp_path / "known")
    file.write_bytes(b"one")
    [right] = known.sha256([file])
    version = json.loads((tmp_path / "known").read_text())
    status = file.stat()
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    planted = {name: [" ".join(map(str, numbers)), "0" * 64] for name in version}
    (tmp_path / "known").write_text(json.dumps(planted))
    assert known.sha256([file]) == ["0" * 64], "of a folder of one's own"
    (tmp_path / "known").write_text(json.dumps(planted))
    tmp_path.chmod(0o777)
    assert known.sha256([file]) == [right]
