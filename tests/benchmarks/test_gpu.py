"""`draftwood bench gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, timeout: float = 290, **variables: str) -> subprocess.CompletedProcess[str]:
    """`draftwood bench gpu`, with Triton compiled unless the variables say that it is interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", "draftwood_benchmarks", "gpu", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "no CUDA device; --smoke needs none"), (["--smoke", "--section", "flips"], "--section must be one of")],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_program_for_a_gpu_runs_without_one(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = run("--smoke", "--json", str(path), timeout=890, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert {row["strategy"] for row in found["streams"]} == {"none", "hybrid"}
    assert found["rows"] == found["steps"]
    assert all(found[name] for name in ("correctness", "drafts", "ahead", "transformers", "exact"))


@pytest.mark.timeout(300)
def test_the_device_s_drafts_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = run("--smoke", "--section", "drafts", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["drafts"]
    assert [(row["streams"], row["nodes"]) for row in rows] == [(2, 16), (2, 64)]
    assert all(0 < row["drafted"] <= row["nodes"] for row in rows)
    assert all(min(row[part] for part in ("us", "learn_us", "mix_us", "mix_learn_us")) > 0 for row in rows)
