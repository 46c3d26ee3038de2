"""`draftwood serve --check`: all that is wrong, a line each; and what would start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftwood_model_runner.errors import ModelNotFoundError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.loading.sources import resolve
from draftwood_service.checking import check
from draftwood_service.commands import serve
from draftwood_service.config import read_settings, service_links
from draftwood_strategies.registry import know_offered
from tests.certificates import make_certificate
from tests.draft_models import write_untrained_head

CHECKS = """
import sys
from draftwood_service.commands import serve
assert serve(sys.argv[1:]) == 0
large = {"torch", "transformers", "numba", "vllm", "openvino"} & sys.modules.keys()
assert not large, large
"""
LINKS = {
    "DRAFTWOOD_SERVICE_HOST": "10.0.0.1",
    "DRAFTWOOD_SERVICE_PORT_GRPC": "50051",
    "DRAFTWOOD_PORT": "tcp://10.0.0.1:50051",
    "DRAFTWOOD_PORT_50051_TCP_PROTO": "tcp",
    "DRAFTWOOD_VALKEY_SERVICE_HOST": "10.0.0.2",
}


def problems(
    capsys: pytest.CaptureFixture[str], *args: str, status: int = 1, environ: dict[str, str] | None = None
) -> list[str]:
    assert check([*args, "--port", "0"], environ or {}) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    return [line.removeprefix("draftwood serve: ") for line in shown.err.splitlines()]


def test_what_would_start_is_said_without_importing_anything_large(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants: [{name: tenants/acme, drafting: {strategy: trie}}]")
    ready = tmp_path / "ready"
    ready.write_text("of a server that runs")
    args = ["--check", "--port", "0", "--store", "redis://user:secret@cache.example", "--tenants-file", str(tenants)]
    args += ["--ready-file", str(ready)]
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "model: the bundled demo model"
    assert {"store: server cache.example:6379", "tenants: 1, experiments: 0"} <= {*lines}
    assert "secret" not in done.stdout
    assert ready.read_text() == "of a server that runs"


def test_every_wrong_setting_is_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "draftwood.yaml"
    config.write_text("{max_runing: 4, dtype: half, threads: many}")
    given = ["--config", str(config), "--strategy", "tri", "--max-waitng", "3"]
    shown = problems(capsys, *given, status=2, environ={"DRAFTWOOD_STOR": "memory"})
    by_name = {line.partition(":")[0]: line for line in shown}
    names = ("--max-waitng", "DRAFTWOOD_STOR", "max_runing", "--strategy", "dtype", "threads many")
    assert sorted(by_name) == sorted(names)
    assert by_name["max_runing"].endswith(f"no such setting; did you mean max_running? (from {config})")
    assert "'half' is not allowed; it must be 'auto', 'float32', 'bfloat16' or 'float16'" in by_name["dtype"]


def test_every_wrong_file_is_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other = make_certificate(tmp_path / "other")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("keys: [{id: k}]")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    given = {
        "--model": model,
        "--tls-cert": certificate,
        "--tls-key": other,
        "--auth-file": wrong,
        "--store-key-file": wrong,
        "--tenants-file": wrong,
        "--ready-file": tmp_path / "none" / "ready",
    }
    shown = problems(capsys, *(str(word) for pair in given.items() for word in pair))
    for line, start in zip(
        shown,
        [
            f"model '{model}': 1.safetensors is missing, which model.safetensors.index.json names (1 of 1 files are)",
            f"--tls-cert {certificate}: is no PEM certificate chain, or {other} is not its private key",
            "--auth-file: keys[0].",
            "--store-key-file: key 1 has no id",
            "--tenants-file",
            f"--ready-file {tmp_path}/none/ready: cannot be written",
        ],
        strict=True,
    ):
        assert line.startswith(start)
    tls = ("--tls-cert", str(certificate), "--tls-key", str(key), "--tls-client-ca", str(wrong))
    assert problems(capsys, *tls) == [f"--tls-client-ca {wrong}: has no PEM certificate"]


def test_models_that_draft_are_looked_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    head = write_untrained_head(tmp_path / "head")
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants: [{name: tenants/acme, drafting: {strategy: head}}]")
    given = ["--tenants-file", str(tenants), "--draft-model", BUNDLED_MODEL]
    try:
        assert check(["--port", "0", "--draft-head", head, *given], {}) == 0
        lines = capsys.readouterr().out.splitlines()
        assert {f"draft model: folder {BUNDLED_MODEL}", f"draft head: folder {head}"} <= {*lines}
        shown = problems(capsys, *given[:2], "--draft-model", "/no/such", "--draft-head", str(tmp_path))
        files = "it must be auto, mtp, none or a folder with config.json and model.safetensors"
        assert shown == [f"--draft-head: '{tmp_path}' is not allowed; {files}"]
        [no_model, no_head] = problems(capsys, *given[:2], "--draft-model", "/no/such")
        assert no_model == "--draft-model /no/such: no such folder; give a folder or a hub id such as org/name"
        assert no_head.startswith("--tenants-file")
        assert no_head.endswith("head is there if `draftwood serve` has --draft-head")
        before_fetching = ["--check=without-model", "--draft-head", "/models/h", "--draft-model", "/models/m"]
        assert check(["--port", "0", *before_fetching, *given[:2]], {}) == 0
        assert serve(["--port", "0", "--draft-model", "/no/such"]) == 1
        assert capsys.readouterr().err == f"draftwood serve: {no_model}\n"
    finally:
        know_offered([])


def test_models_are_looked_up_and_not_downloaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hub = {"HF_HOME": str(tmp_path)}
    gguf, html, empty = (tmp_path / name for name in ("m.gguf", "h.gguf", "empty"))
    kept = tmp_path / "hub" / "models--org--kept" / "snapshots" / "a"
    kept.mkdir(parents=True)
    (kept / "config.json").touch()
    gguf.write_bytes(b"GGUF")
    html.write_bytes(b"<htm")
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    for model, found in (
        ("org/name", "org/name, which is downloaded from https://huggingface.co"),
        ("org/kept", "org/kept of the hub, downloaded before"),
        (gguf, "GGUF file"),
    ):
        assert check(["--port", "0", "--model", str(model)], hub) == 0
        assert capsys.readouterr().out.startswith(f"model: {found}")
    for model, problem in (
        ("org/name", "it was not downloaded before, and HF_HUB_OFFLINE forbids to ask the hub"),
        (html, "is not a GGUF file"),
        (empty, "has no weights"),
        ("/models/later", "no such folder; give a folder or a hub id such as org/name"),
    ):
        [line] = problems(capsys, "--model", str(model), environ=hub | {"HF_HUB_OFFLINE": "1"})
        assert line.startswith(f"model '{model}': ")
        assert problem in line
    assert serve(["--check=without-model", "--model", "/models/later", "--port", "0"]) == 0
    assert "model" not in capsys.readouterr().out


@pytest.mark.parametrize("model", ["s3://models/qwen3-8b", "s3://models/q4.gguf"])
def test_a_model_in_s3_is_served_from_a_folder(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"model {model!r}: is downloaded by `draftwood models {model} --to FOLDER`; give that folder"
    assert problems(capsys, "--check", "--model", model) == [said]
    assert serve(["--check=without-model", "--model", model, "--port", "0"]) == 1
    assert said in capsys.readouterr().err
    with pytest.raises(ModelNotFoundError, match="is downloaded by"):
        resolve(model, None, {})


def test_variables_of_service_links_are_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert {*service_links({**LINKS, "DRAFTWOOD_HEALTH_PORT": "50052", "HOME": "/"})} == LINKS.keys()
    settings = read_settings([], {**LINKS, "DRAFTWOOD_HEALTH_PORT": "50052"})
    assert (settings.port, settings.health_port) == (50051, 50052)
    assert "must be an integer" in problems(capsys, status=2, environ={"DRAFTWOOD_HEALTH_PORT": "many"})[0]
    command = [sys.executable, "-m", "draftwood_service", "--model", "/no/such", "--port", "0", "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **LINKS}, check=False)
    first, second = done.stderr.splitlines()
    told = json.loads(first)
    assert told["event"] == "variables of Kubernetes' service links are no settings, and are ignored"
    assert {*told["variables"]} == LINKS.keys()
    assert second.startswith("draftwood serve: model '/no/such'")
