"""`draftwood bench gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from draftwood_benchmarks.gpu import targets
from draftwood_benchmarks.harness.widen import SHAPES, parse_shape, shape_of
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.runners.cuda.device import require_triton

pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, timeout: float = 290, **variables: str) -> subprocess.CompletedProcess[str]:
    """`draftwood bench gpu`, with Triton compiled unless the variables say that it is interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", "draftwood_benchmarks", "gpu", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    done = run()
    assert done.returncode == 1
    assert "no CUDA device; --smoke needs none" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_program_for_a_gpu_runs_without_one(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = run("--smoke", "--json", str(path), timeout=890, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert all(row["error"] < 1e-5 for row in found["attention"]), "float32"
    assert {row["strategy"] for row in found["streams"]} == {"none", "hybrid"}


@pytest.mark.timeout(300)
def test_the_device_s_drafts_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = run("--smoke", "--section", "drafts", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["drafts"]
    assert [(row["streams"], row["nodes"]) for row in rows] == [(2, 16), (2, 64)]
    assert all(0 < row["drafted"] <= row["nodes"] for row in rows)
    assert all(min(row[part] for part in ("us", "learn_us", "mix_us", "mix_learn_us")) > 0 for row in rows)


def test_causal_attention_of_the_same_size_sees_the_whole_context() -> None:
    require_triton(torch.device("cpu"))
    from draftwood_benchmarks.gpu_attention import AttentionCase

    case = AttentionCase(100, 6, torch.device("cpu"), torch.float32)
    keys, values = (part.repeat_interleave(4, 1) for part in case._side_by_side)
    seen = torch.ones(7, 107, dtype=torch.bool).tril(100)
    expected = torch.nn.functional.scaled_dot_product_attention(case._query, keys, values, attn_mask=seen)
    torch.testing.assert_close(case.run_causal(), expected)
    assert case.error() < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bundled_model_grows_to_every_shape(shape: str) -> None:
    wanted = parse_shape(shape)
    bundled = shape_of(AutoConfig.from_pretrained(BUNDLED_MODEL))
    assert wanted is not None
    assert all(
        getattr(wanted, name) >= getattr(bundled, name) for name in ("hidden", "layers", "heads", "intermediate")
    )


def test_targets_are_met_missed_or_not_measured() -> None:
    steps = [
        {"context": 2048, "tokens": 1, "ms": 3.9, "floor_ms": 3.0},
        {"context": 2048, "tokens": 64, "ms": 4.0, "floor_ms": 3.0},
    ]
    names = ("streams", "strategy", "memory", "over_off", "host_us_per_step")
    rows = [
        dict(zip(names, values, strict=True)) | {"tokens_per_s": 250.0 * values[3]}
        for values in (
            (1, "none", "cold", 1.0, 180.0),
            (1, "trie", "cold", 2.0, 240.0),
            (1, "trie", "again", 6.0, 230.0),
        )
    ]
    found = targets({"steps": steps, "streams": rows})
    by_name = {row["target"].partition(",")[0]: (row["reached"], row["met"]) for row in found}
    assert by_name["one token over the floor"] == (pytest.approx(1.3), False)
    assert by_name["64 tokens over one"][1] is True
    assert by_name["host at one stream"] == (240.0, True)
    assert by_name["same questions again over drafting off"] == (6.0, True)
    assert by_name["drafting off over transformers"] == (None, None)
    assert by_name["throughput with drafts over without"] == (None, None)
    assert by_name["share of a step that the host takes"] == (None, None)
