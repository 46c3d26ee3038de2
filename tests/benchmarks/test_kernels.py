"""`draftwood bench kernels` and `bench gpu`: real compilation of some kernels, and what is made of the figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from draftwood_benchmarks.gpu.command import LONG_SHAPES
from draftwood_benchmarks.gpu.prediction import DEVICES, LAYER_KERNELS, MODELS, best_nodes, markdown, predict
from draftwood_benchmarks.gpu.targets import targets
from draftwood_benchmarks.harness.widen import SHAPES, _config, parse_shape
from draftwood_benchmarks.kernels.command import defects
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.runners.cuda.device.launching import require_triton

pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, interpret: bool = False, timeout: float = 290) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    code = "import sys; from draftwood_benchmarks.commands import bench; sys.exit(bench(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "arch", ["80", "90", "100", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("89", "120"))]
)
def test_every_specialisation_compiles_without_spilling(arch: str, tmp_path: Path) -> None:
    done = run("kernels", "--arch", arch, "--jobs", "1", "--json", str(tmp_path / "k.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "k.json").read_text())["rows"]
    names = (
        "attention_parts merge_parts write_kv move_kv linear choose_tokens accept_paths rms_norm convolve recurrence"
    )
    assert {*names.split()} <= {row["kernel"] for row in rows}
    assert all(row["cubin_bytes"] > 1000 and row["spills"] <= 64 for row in rows)


def row(**changes: Any) -> dict[str, Any]:
    return {"kernel": "attention_parts", "variant": "64", "arch": "sm_80", "shared_bytes": 1024, "spills": 0} | changes


def test_defects_are_named() -> None:
    assert defects([row()]) == []
    [spilled] = defects([row(spills=700)])
    assert "attention_parts (64, sm_80) spills 700 bytes" in spilled
    [large] = defects([row(shared_bytes=200_000)])
    assert "needs 200000 bytes of shared memory, there are 166912" in large
    assert defects([row(shared_bytes=200_000, arch="sm_90")]) == []


def test_interpreted_kernels_cannot_be_compiled() -> None:
    done = run("kernels", interpret=True)
    assert done.returncode == 1
    assert "TRITON_INTERPRET=1" in done.stderr


def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    done = run("gpu")
    assert done.returncode == 1
    assert "no CUDA device; --predict and --smoke need none" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_program_for_a_gpu_runs_without_one(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = run("gpu", "--smoke", "--json", str(path), interpret=True, timeout=890)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert all(row["error"] < 1e-5 for row in found["attention"]), "float32"
    assert {row["strategy"] for row in found["streams"]} == {"none", "hybrid"}


def test_causal_attention_of_the_same_size_sees_the_whole_context() -> None:
    require_triton(torch.device("cpu"))
    from draftwood_benchmarks.gpu.attention import AttentionCase

    case = AttentionCase(100, 6, torch.device("cpu"), torch.float32)
    keys, values = (part.repeat_interleave(4, 1) for part in case._side_by_side)
    seen = torch.ones(7, 107, dtype=torch.bool).tril(100)
    expected = torch.nn.functional.scaled_dot_product_attention(case._query, keys, values, attn_mask=seen)
    torch.testing.assert_close(case.run_causal(), expected)
    assert case.error() < 1e-5


@pytest.mark.parametrize("shape", [*SHAPES, *LONG_SHAPES])
def test_the_bundled_model_grows_to_every_shape(shape: str) -> None:
    wanted = parse_shape(LONG_SHAPES.get(shape, shape))
    assert wanted is not None
    config = _config(AutoConfig.from_pretrained(BUNDLED_MODEL), wanted, None)
    assert (config.hidden_size, config.num_hidden_layers) == (wanted.hidden, wanted.layers)


def test_targets_are_met_missed_or_not_measured() -> None:
    steps = [
        {"context": 2048, "tokens": 1, "ms": 3.9, "floor_ms": 3.0},
        {"context": 2048, "tokens": 64, "ms": 4.0, "floor_ms": 3.0},
    ]
    names = ("streams", "strategy", "memory", "over_off", "host_us_per_step")
    rows = [
        dict(zip(names, values, strict=True)) | {"tokens_per_s": 250.0 * values[3]}
        for values in ((1, "none", "", 1.0, 180.0), (1, "trie", "cold", 2.0, 240.0), (1, "trie", "warm", 6.0, 230.0))
    ]
    found = targets({"steps": steps, "streams": rows})
    by_name = {row["target"].partition(",")[0]: (row["reached"], row["met"]) for row in found}
    assert by_name["one token over the floor"] == (pytest.approx(1.3), False)
    assert by_name["64 tokens over one"][1] is True
    assert by_name["host at one stream"] == (240.0, True)
    assert by_name["warm over drafting off"] == (6.0, True)
    assert by_name["drafting off over transformers"] == (None, None)
    assert by_name["throughput with drafts over without"] == (None, None)
    assert by_name["share of a step that the host takes"] == (None, None)


def test_the_predictions_of_the_documentation() -> None:
    assert markdown() in (ROOT / "docs" / "gpu.md").read_text()


def test_predictions_obey_the_floor_and_grow_with_the_tree() -> None:
    for device in DEVICES:
        for model in MODELS:
            one, some, many = (predict(device, model, 8, nodes, 2048) for nodes in (0, 15, 255))
            assert one.floor < one.seconds <= some.seconds < many.seconds
            assert best_nodes(device, model, 1, 2048) >= best_nodes(device, model, 64, 2048)


def test_the_page_names_the_kernels_that_a_layer_launches() -> None:
    assert re.search(rf"\b{LAYER_KERNELS} kernels a Llama layer", (ROOT / "docs" / "gpu.md").read_text())
