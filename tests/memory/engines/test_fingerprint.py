"""A checkpoint's fingerprint from its files: that of the server, which loads the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from draftwood_memory.engines.fingerprint import UnknownCheckpointError, fingerprint_of
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.loading.loaded import fingerprint
from draftwood_model_runner.loading.tokenizer import load_tokenizer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_it_is_that_of_the_loaded_model(tmp_path: Path, dtype: str, tied: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97, hidden_size=24, intermediate_size=33, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size="20KB")
    shutil.copy(Path(BUNDLED_MODEL, "tokenizer.json"), tmp_path)
    shutil.copy(Path(BUNDLED_MODEL, "tokenizer_config.json"), tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    tokenizer = load_tokenizer(str(tmp_path))
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert fingerprint_of(tmp_path, tokenizer.token_ids()) == fingerprint(module, tokenizer)


def test_another_vocabulary_is_another_model() -> None:
    first, second = (fingerprint_of(Path(BUNDLED_MODEL), {"a": 0, last: 1}) for last in "bc")
    assert first != second
    assert len(first) == 16


def test_files_without_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownCheckpointError, match=r"config\.json"):
        fingerprint_of(tmp_path, {})
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UnknownCheckpointError, match="no weights as safetensors"):
        fingerprint_of(tmp_path, {})
