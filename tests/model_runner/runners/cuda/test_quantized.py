"""Checkpoints with quantized weights: served with the tokens of transformers' own `generate`, or refused with why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

from model_runner.errors import ModelNotFoundError
from model_runner.loading.model import BUNDLED_MODEL, load_model
from tests.model_runner.families import VOCAB, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.test_lossless import NEW_TOKENS, PROMPTS, run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in 8 bits, as torchao stores it."""
    torchao = pytest.importorskip("torchao.quantization", reason="`make test-quantized` installs torchao")
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("int8")
    tiny("llama", num_hidden_layers=1).save_pretrained(plain)
    quantization = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantization).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(folder)
    return folder


def test_weights_of_8_bits_by_torchao(checkpoint: Path) -> None:
    model = load_model(str(checkpoint), runner="cuda", device=str(DEVICE), generation_defaults="greedy")
    assert (model.factory.name, model.weights, model.dtype) == ("cuda", "torchao", "float32")
    reference: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    reference, answers = reference.to(DEVICE), {}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=DEVICE)
        with torch.inference_mode():
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
        answers[prompt] = out[0, len(prompt) :].tolist()
    sequences = run(model, OracleStrategy(answers, VOCAB, seed=3))
    assert [one.output for one in sequences] == list(answers.values())
    assert sum(one.stats.accepted_tokens for one in sequences) > 0


@pytest.mark.parametrize("method", ["awq", "bitsandbytes", "gptq"])
def test_what_reads_quantized_weights_is_not_installed(method: str, tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_MODEL, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotFoundError, match=r"cannot be loaded: .*pip install"):
        load_model(str(tmp_path))
