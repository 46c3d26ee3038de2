"""Checkpoints with quantized weights: served with the tokens of transformers' own `generate`, or refused with why."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

from draftwood_model_runner.errors import ModelNotFoundError, UnsupportedModelError
from draftwood_model_runner.loading.model import BUNDLED_MODEL, load_model
from tests.model_runner.families import VOCAB, generate, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.test_lossless import NEW_TOKENS, PROMPTS, run

NEEDED = "`make test-quantized` installs what reads it"
BLOCK = 128
SIZES = {"num_hidden_layers": 1, "hidden_size": BLOCK, "intermediate_size": 2 * BLOCK, "head_dim": BLOCK // 2}


def torchao_8_bits(plain: Path, folder: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason=NEEDED)
    quantization = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantization).save_pretrained(folder)


def bitsandbytes_4_bits(plain: Path, folder: Path) -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDED)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantization).save_pretrained(folder)


def compressed_4_bits(plain: Path, folder: Path) -> None:
    """As llm-compressor writes what GPTQ and AWQ make: integers of 4 bits in groups, packed in 32."""
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized", reason=NEEDED)
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}}
    of_layers = importlib.import_module("compressed_tensors.quantization").QuantizationScheme(**scheme)

    def quantized(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scales = weight.view(weight.shape[0], -1, 32).abs().amax(-1) / 7.5
        parts = packing.PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scales}, of_layers)
        return {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}

    rewrite(plain, folder, quantized, compressed("pack-quantized", scheme))


def compressed_fp8(plain: Path, folder: Path) -> None:
    """Weights in float8 with a scale for each output, and activations that are rounded to float8, each token by its own
    scale."""
    pytest.importorskip("compressed_tensors", reason=NEEDED)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    inputs = weights | {"strategy": "token", "dynamic": True}

    def quantized(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scales = weight.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        return {name: (weight / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales}

    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    rewrite(plain, folder, quantized, compressed("float-quantized", scheme))


def compressed(form: str, scheme: dict[str, Any]) -> dict[str, Any]:
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}


def fp8_blocks(plain: Path, folder: Path) -> None:
    """As DeepSeek's and Qwen's: float8 with a scale for each block; on a CPU transformers makes them bfloat16."""

    def quantized(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = weight.view(weight.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        levels = (blocks / scales[:, None, :, None]).view_as(weight)
        return {name: levels.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    rewrite(plain, folder, quantized, config)


def rewrite(
    plain: Path,
    folder: Path,
    quantized: Callable[[str, torch.Tensor], dict[str, torch.Tensor]],
    quantization: dict[str, Any],
) -> None:
    """A checkpoint whose projections are what `quantized` makes of their names and weights."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors |= quantized(name, tensor) if name.endswith("_proj.weight") else {name: tensor}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


FORMATS: dict[Callable[[Path, Path], None], str] = {
    torchao_8_bits: "torchao",
    bitsandbytes_4_bits: "bitsandbytes",
    compressed_4_bits: "compressed-tensors",
    compressed_fp8: "compressed-tensors",
    fp8_blocks: "fp8" if DEVICE.type == "cuda" else "float32",
}


def write(folder: Path, chosen: Callable[[Path, Path], None]) -> None:
    """A tiny model in a format, with a tokenizer."""
    plain = folder / "plain"
    tiny("llama", **SIZES).save_pretrained(plain)
    chosen(plain, folder)
    AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(folder)


@pytest.fixture(scope="module", params=FORMATS, ids=lambda chosen: chosen.__name__)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A tiny model, and the name of its quantization."""
    folder = tmp_path_factory.mktemp("quantized")
    write(folder, request.param)
    return folder, FORMATS[request.param]


@pytest.mark.parametrize("runner", ["cuda", "auto"])
def test_a_quantized_checkpoint(checkpoint: tuple[Path, str], runner: str) -> None:
    folder, method = checkpoint
    if method == "fp8":
        pytest.importorskip("kernels", reason="transformers multiplies blocks of float8 with it")
    interpreted = (method, runner, DEVICE.type) == ("bitsandbytes", "cuda", "cpu")
    if interpreted and importlib.import_module("bitsandbytes.functional").has_avx512bf16():
        pytest.skip("bitsandbytes rounds to bfloat16 on this CPU, by the number of rows")
    model = load_model(str(folder), runner=runner, device=str(DEVICE), generation_defaults="greedy")
    assert (model.weights, model.dtype) == (method, "float32")
    assert runner == "auto" or model.factory.name == "cuda"
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map={"": DEVICE})
    answers = {prompt: generate(reference, prompt, NEW_TOKENS) for prompt in PROMPTS}
    sequences = run(model, OracleStrategy(answers, VOCAB, seed=3))
    assert [sequence.output for sequence in sequences] == list(answers.values())
    assert sum(sequence.stats.accepted_tokens for sequence in sequences) > 0


@pytest.mark.parametrize("runner", ["cuda", "torch"])
def test_activations_that_are_divided_by_the_whole_batch_are_refused(tmp_path: Path, runner: str) -> None:
    """LLM.int8: columns with an outlier in any token are multiplied apart from the others."""
    pytest.importorskip("bitsandbytes", reason=NEEDED)

    def bitsandbytes_8_bits(plain: Path, folder: Path) -> None:
        quantization = BitsAndBytesConfig(load_in_8bit=True)
        AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantization).save_pretrained(folder)

    write(tmp_path, bitsandbytes_8_bits)
    with pytest.raises(UnsupportedModelError, match="depends on the other tokens of a step"):
        load_model(str(tmp_path), runner=runner, device=str(DEVICE))


@pytest.mark.parametrize("method", ["awq", "bitsandbytes", "gptq"])
def test_what_reads_quantized_weights_is_not_installed(method: str, tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_MODEL, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    if find_spec(method.replace("awq", "gptqmodel").replace("gptq", "gptqmodel")):
        pytest.skip("it is installed")
    options = {"load_in_4bit": True} if method == "bitsandbytes" else {"bits": 4, "group_size": 128}
    config["quantization_config"] = {"quant_method": method, **options}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotFoundError, match=r"cannot be loaded: .*pip install"):
        load_model(str(tmp_path))
