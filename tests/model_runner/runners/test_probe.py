"""Which models are refused, and that the reason is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from draftwood_model_runner.errors import InvalidValueError, ModelNotFoundError, UnsupportedModelError
from draftwood_model_runner.loading.model import BUNDLED_MODEL, load_model
from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.shrinking import randomized, rotation_limit
from draftwood_model_runner.runners.states import mixers
from draftwood_model_runner.runners.torch import machine
from draftwood_model_runner.runners.torch.kv_cache import KVLayout
from draftwood_model_runner.runners.torch.probe import probe
from tests.model_runner.families import RANDOM_FAMILIES, taken_over, tiny
from tests.model_runner.tiny import TINY, build

_MAX_CONTEXT = 128
_LLAMA4: dict[str, Any] = {**TINY, "num_local_experts": 2, "num_key_value_heads": 2, "head_dim": 16, "floor_scale": 64}
_MLA = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_NO_CHUNKS: dict[str, Any] = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]}
_MAMBA2: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid"],
    "mamba_d_state": 8,
    "n_mamba_heads": 8,
    "chunk_size": 16,
    "num_key_value_heads": 4,
}
_EXPERTS: dict[str, Any] = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


def probed(config: Any, max_context: int = _MAX_CONTEXT) -> KVLayout:
    return probe(randomized(build(config)), exact=False, max_context=max_context)


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_a_fault_of_ours_is_not_hidden_by_the_models_own_attention(family: str) -> None:
    """A model whose tree attention raises is served with its own attention: right, slow, and only a warning."""
    assert probe(tiny(family), exact=False, max_context=_MAX_CONTEXT).own is None


def test_a_recurrence_that_cannot_follow_a_tree_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: there transformers' own function is called, which computes several tokens otherwise than one."""
    monkeypatch.setattr(mixers, "scanning", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="raises time steps of its state-space layers"):
        probed(tf.Zamba2Config(**{**TINY, **_MAMBA2}))


def test_a_model_whose_logits_depend_on_more_than_attention_is_refused() -> None:
    """What a node computes must not depend on the nodes beside it: here each row sees its neighbour's state."""
    module = build(tf.LlamaConfig(**TINY))
    module.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out: out + 0.1 * out.roll(1, dims=1))
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        probe(module, exact=False, max_context=_MAX_CONTEXT)


def test_a_model_with_a_hidden_sliding_window_keeps_its_own_attention() -> None:
    """The window reaches the model's own mask, but not the attention function."""
    sliding: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    module = build(tf.Qwen2Config(**TINY, num_key_value_heads=2, **sliding))
    module.model.layers[1].self_attn.sliding_window = None
    layout = probe(module, exact=False, max_context=_MAX_CONTEXT)
    assert layout.own is not None
    assert layout.own.tree_masks == "by kind"
    assert probe(module, exact=False, max_context=64).own is None


@pytest.mark.parametrize(
    ("config", "masks"),
    [
        (lambda: tf.PhimoeConfig(**TINY, **_EXPERTS, sliding_window=64), None),
        (lambda: tf.Llama4TextConfig(**_LLAMA4, **_NO_CHUNKS), None),
        (lambda: tf.Llama4TextConfig(**_LLAMA4, attention_chunk_size=64), "by kind"),
    ],
    ids=["sliding_window", "floor_scale", "attention_chunk_size"],
)
def test_what_differs_beyond_a_threshold_only_keeps_its_own_attention_there(config: Any, masks: str | None) -> None:
    beyond, within = probed(config()), probed(config(), max_context=64)
    assert beyond.own is not None
    assert beyond.own.tree_masks == masks
    assert within.own is None
    assert len(within.shapes) == 2


def test_latent_attention_keeps_its_latents() -> None:
    sizes: dict[str, Any] = {**TINY, **_MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    layout = probed(tf.DeepseekV3Config(**sizes, num_key_value_heads=4))
    assert set(layout.shapes) == {KVShape(1, 32 + 8, 0)}


@pytest.mark.system
def test_keys_and_values_of_other_shapes_in_other_layers_are_served() -> None:
    kinds = ["sliding_attention", "full_attention"]
    sizes: dict[str, Any] = {**TINY, "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2}
    config = tf.Gemma4TextConfig(**sizes, layer_types=kinds, num_kv_shared_layers=0)
    assert probed(config).shapes == (KVShape(2, 16, 16), KVShape(2, 32, 32))


@pytest.mark.system
def test_layers_that_use_the_keys_and_values_of_others_are_served() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes: dict[str, Any] = {**TINY, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 16}
    config = tf.Gemma4TextConfig(**sizes, layer_types=kinds, num_key_value_heads=2, num_kv_shared_layers=2)
    assert len(probed(config).shapes) == 4


def test_a_model_that_drops_extra_arguments_is_served() -> None:
    assert len(probed(tf.StableLmConfig(**TINY, num_key_value_heads=4)).shapes) == 2


def test_rotations_by_type_of_layer_cap_the_context() -> None:
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0}
    rope = {"full_attention": long, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = tf.Gemma3TextConfig(**TINY, head_dim=16)
    config.rope_parameters = rope
    assert rotation_limit(config) == ("longrope", 32)


def test_rotations_that_depend_on_the_longest_position_cap_the_context(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    module = build(tf.LlamaConfig(**TINY, max_position_embeddings=256, rope_parameters=rope))
    model = taken_over(module)
    assert model.max_context == 64
    assert "dynamic" in caplog.text


@pytest.mark.parametrize("path", ["/no/such/folder", "./nor/this/one", ""])
def test_a_missing_model_is_named(path: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        load_model(path)


def test_a_folder_without_a_model_is_named(tmp_path: Any) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFoundError, match="no tokenizer"):
        load_model(str(tmp_path))


def test_a_checkpoint_that_was_not_copied_to_its_end_is_named(tmp_path: Path) -> None:
    for file in Path(BUNDLED_MODEL).iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(
                file.read_bytes()[:2000] if ".safetensors" in file.name else file.read_bytes()
            )
    with pytest.raises(ModelNotFoundError, match="its weights cannot be loaded"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"device": "toaster"}, "device"), ({"dtype": "int3"}, "dtype"), ({"max_context": 10**9}, "max_context")],
)
def test_a_bad_option_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        load_model(BUNDLED_MODEL, **options)
    assert caught.value.field == field


def test_kernel_caches_are_bounded_before_the_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch and oneDNN read their limits once, at the first product of the process."""
    seen: list[bool] = []
    for name in machine.KERNEL_CACHES:
        monkeypatch.delenv(name, raising=False)
    module = build(tf.LlamaConfig(**TINY)).to(torch.bfloat16)
    module.register_forward_pre_hook(lambda *_: seen.append(all(name in os.environ for name in machine.KERNEL_CACHES)))
    probe(module, exact=False, max_context=_MAX_CONTEXT)
    assert seen
    assert all(seen)
    for name in machine.KERNEL_CACHES:
        monkeypatch.delenv(name)
