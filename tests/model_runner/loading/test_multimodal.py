"""Multimodal checkpoints: their text part is served, and writes what `generate` of the whole model writes on text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from draftwood_model_runner.errors import ModelNotFoundError
from draftwood_model_runner.loading.loaded import load_module
from draftwood_model_runner.loading.model import BUNDLED_MODEL, LoadedModel, load_model
from draftwood_model_runner.loading.text_part import text_part
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.shrinking import randomized
from tests.model_runner.families import generate
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import batch_of, engine_of, run
from tests.model_runner.small_models import TINY, tiny_hybrid

VOCAB, NEW, DRAFT = 256, 24, 24
_TEXT: dict[str, Any] = {
    **TINY,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
_MIXED: dict[str, Any] = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
_QWEN_IDS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}


def _rope(*sections: int, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], **others}}


_PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0}
CONFIGS: dict[str, Any] = {
    "gemma3": {
        "text_config": _TEXT | _MIXED,
        "vision_config": _VISION,
        "image_token_index": 250,
        "boi_token_index": 251,
        "eoi_token_index": 252,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": _TEXT | _MIXED | _PER_LAYER | {"global_head_dim": 16},
        "vision_config": _VISION | {"pooling_kernel_size": 1, "head_dim": 16},
        "image_token_id": 250,
        "audio_token_id": 251,
        "video_token_id": 252,
    },
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral", "sliding_window": 20},
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 16},
        "image_token_index": 250,
    },
    "llava": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model"},
        "image_token_index": 250,
    },
    "internvl": {
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": _VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_index": 250,
    },
    "llama4": {
        "text_config": _TEXT
        | {
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 32,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "vision_config": _VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        "image_token_index": 250,
    },
    "qwen2_5_vl": {
        "text_config": {key: value for key, value in _TEXT.items() if key != "head_dim"} | _rope(4, 2, 2),
        "vision_config": _QWEN_VISION | {"fullatt_block_indexes": [0]},
        **_QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": _TEXT | _rope(4, 2, 2),
        "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]},
        **_QWEN_IDS,
    },
    "qwen3_5": {
        "text_config": _TEXT
        | {
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        }
        | _rope(2, 1, 1, partial_rotary_factor=0.5),
        "vision_config": _QWEN_VISION,
        **_QWEN_IDS,
    },
}
SERVED = {
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "llava": "LlamaForCausalLM",
    "internvl": "Qwen2ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForCausalLM",
}
"""What is served of each: the text model of transformers, or the whole where it has none."""


def whole_model(family: str) -> Any:
    torch.manual_seed(0)
    config = tf.AutoConfig.for_model(family, **CONFIGS[family])
    whole = randomized(tf.AutoModelForMultimodalLM.from_config(config).float().eval())
    whole.generation_config = tf.GenerationConfig(pad_token_id=0)
    return whole


def saved(whole: Any, folder: Path) -> Path:
    whole.save_pretrained(folder)
    tf.AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(folder)
    return folder


def runs(whole: Any) -> bool:
    """Whether transformers runs it on text alone: Llama 4 of 5.24.0 looks for an output that its text model lacks."""
    try:
        with torch.inference_mode():
            whole(input_ids=torch.ones(1, 2, dtype=torch.long))
    except AttributeError:
        assert (whole.config.model_type, tf.__version__) == ("llama4", "5.24.0")
        return False
    return True


def written(model: LoadedModel, prompts: list[Any], answers: list[list[int]]) -> list[list[int]]:
    oracle = OracleStrategy(dict(zip([tuple(prompt.tolist()) for prompt in prompts], answers, strict=True)), VOCAB, 0)
    sequences = batch_of(prompts, StopParams(NEW), strategy=oracle, max_draft_nodes=DRAFT)
    run(engine_of(model, DRAFT, max_running=4), *sequences)
    assert sum(sequence.stats.accepted_tokens for sequence in sequences) > NEW
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("runner", ["torch", "auto"])
@pytest.mark.parametrize("family", CONFIGS)
def test_its_text_part_writes_what_the_whole_writes(
    family: str, runner: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole = whole_model(family)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 240, size, np.int32) for size in (3, 30, 90)]
    path = str(saved(whole, tmp_path))
    answers = [generate(whole if runs(whole) else text_part(whole), prompt, NEW) for prompt in prompts]
    caplog.clear()
    model = load_model(path, runner=runner, exact=False if runner == "torch" else None)
    assert model.architecture == SERVED[family]
    assert caplog.text.count("is multimodal") == 1
    assert written(model, prompts, answers) == answers


def test_a_checkpoint_whose_images_need_more_serves_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma 3n does without timm."""
    text = tiny_hybrid("qwen3_5_text")
    saved(text, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = tf.AutoConfig.for_model("qwen3_5", text_config=text.config.to_dict(), vision_config=_QWEN_VISION)
    config.save_pretrained(tmp_path)
    loaded = load_module(str(tmp_path), torch.device("cpu"), "float32")
    for name, weight in text.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_a_checkpoint_without_all_weights_is_refused(tmp_path: Path) -> None:
    """transformers would go on with random ones."""
    saved(whole_model("llava"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file(
        {name: weight for name, weight in weights.items() if name != gone},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelNotFoundError, match=r"no weights for .*layers\.1\.mlp\.up_proj\.weight, 1 in all"):
        load_module(str(tmp_path), torch.device("cpu"), "float32")
