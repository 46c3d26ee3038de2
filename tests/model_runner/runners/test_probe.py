"""Which models are refused with which reason, and on what a small copy is tried."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from transformers import AutoConfig

from draftwood_model_runner.errors import ModelNotFoundError, UnsupportedModelError
from draftwood_model_runner.loading.model import BUNDLED_MODEL, load_model
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners import recurrent_layers
from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.shrinking import (
    THRESHOLD_FIELDS,
    randomized,
    rotation_limit,
    shrunken_config,
    thresholds,
)
from draftwood_model_runner.runners.torch import packed_linear as machine
from draftwood_model_runner.runners.torch.kv_cache import KVLayout
from draftwood_model_runner.runners.torch.probe import probe
from tests.model_runner.families import RANDOM_FAMILIES, generate, taken_over, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import batch_of, engine_of, run
from tests.model_runner.small_models import FAMILIES, NO_TEXT, TINY, build, small_model

_MAX_CONTEXT = 128
_LLAMA4: dict[str, Any] = {**TINY, "num_local_experts": 2, "num_key_value_heads": 2, "head_dim": 16, "floor_scale": 64}
_NO_CHUNKS: dict[str, Any] = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]}
_MAMBA2: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid"],
    "mamba_d_state": 8,
    "n_mamba_heads": 8,
    "chunk_size": 16,
    "num_key_value_heads": 4,
}
_SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
_EXPERTS: dict[str, Any] = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


def probed(config: Any, max_context: int = _MAX_CONTEXT) -> KVLayout:
    return probe(randomized(build(config)), exact=False, max_context=max_context)


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_a_fault_of_ours_is_not_hidden_by_the_models_own_attention(family: str) -> None:
    """A model whose tree attention raises is served with its own attention: right, slow, and only a warning."""
    assert probe(tiny(family), exact=False, max_context=_MAX_CONTEXT).model_cache is None


def test_a_recurrence_that_cannot_follow_a_tree_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: there transformers' own function is called, which computes several tokens otherwise than one."""
    monkeypatch.setattr(recurrent_layers, "scanning", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="raises time steps of its state-space layers"):
        probed(tf.Zamba2Config(**{**TINY, **_MAMBA2}))


def test_a_model_whose_logits_depend_on_more_than_attention_is_refused() -> None:
    """What a node computes must not depend on the nodes beside it: here each row sees its neighbour's state."""
    module = build(tf.LlamaConfig(**TINY))
    module.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out: out + 0.1 * out.roll(1, dims=1))
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        probe(module, exact=False, max_context=_MAX_CONTEXT)


@pytest.mark.parametrize(
    ("config", "masks"),
    [
        (lambda: tf.PhimoeConfig(**TINY, **_EXPERTS, sliding_window=64), None),
        (lambda: tf.Llama4TextConfig(**_LLAMA4, **_NO_CHUNKS), None),
        (lambda: tf.Llama4TextConfig(**_LLAMA4, attention_chunk_size=64), "by kind"),
        # The window reaches the model's own mask, but not the attention function.
        (lambda: tf.Qwen2Config(**TINY, num_key_value_heads=2, **_SLIDING), "by kind"),
    ],
    ids=["sliding_window", "floor_scale", "attention_chunk_size", "hidden sliding_window"],
)
def test_what_differs_beyond_a_threshold_only_keeps_its_own_attention_there(config: Any, masks: str | None) -> None:
    modules = [randomized(build(config())) for _ in range(2)]
    for module in modules:
        if isinstance(module, tf.Qwen2ForCausalLM):
            module.model.layers[1].self_attn.sliding_window = None
    beyond, within = (probe(module, exact=False, max_context=n) for module, n in zip(modules, (128, 64), strict=True))
    assert beyond.model_cache is not None
    assert beyond.model_cache.tree_masks == masks
    assert within.model_cache is None
    assert len(within.shapes) == 2


@pytest.mark.parametrize("family", ["bloom", "gptj"])
@torch.inference_mode()
def test_shared_prefixes_and_preemption_change_nothing_with_a_models_own_attention(family: str) -> None:
    """Over chains and over trees."""
    module = small_model(family)
    module.generation_config = tf.GenerationConfig()
    random = np.random.default_rng(0)
    common = random.integers(3, 128, 40, np.int32)
    prompts = [np.concatenate([common, random.integers(3, 128, n, np.int32)]) for n in (3, 9, 20, 33)]
    answers = [generate(module, prompt, 30) for prompt in prompts]
    model = taken_over(copy.deepcopy(module), name="small", max_context=_MAX_CONTEXT, defaults="greedy")
    oracle = OracleStrategy(dict(zip([tuple(prompt.tolist()) for prompt in prompts], answers, strict=True)), 128, 0)
    engine, stop = engine_of(model, 16, max_running=4, kv_cache_tokens=208), StopParams(30)
    for _ in range(2):  # the second time prefixes are in the cache
        batch = batch_of(prompts, stop, strategy=oracle, max_draft_nodes=8)
        run(engine, *batch)
        assert [sequence.output for sequence in batch] == answers
        assert sum(sequence.stats.accepted_tokens for sequence in batch) > 30


_GEMMA4: dict[str, Any] = {**TINY, "head_dim": 16, "num_key_value_heads": 2}
_WIDE, _SAME = ({**_GEMMA4, "global_head_dim": size} for size in (32, 16))
_KINDS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        pytest.param(  # other shapes in other layers
            lambda: tf.Gemma4TextConfig(**_WIDE, layer_types=_KINDS, num_kv_shared_layers=0),
            [KVShape(2, 16, 16), KVShape(2, 32, 32)],
            marks=pytest.mark.system,
        ),
        pytest.param(  # layers that use the keys and values of others
            lambda: tf.Gemma4TextConfig(
                **_SAME | {"num_hidden_layers": 4}, layer_types=_KINDS * 2, num_kv_shared_layers=2
            ),
            [KVShape(2, 16, 16)] * 4,
            marks=pytest.mark.system,
        ),
        # drops extra arguments of its forward
        (lambda: tf.StableLmConfig(**TINY, num_key_value_heads=4), [KVShape(4, 16, 16)] * 2),
    ],
    ids=["other shapes", "shared", "extra arguments"],
)
def test_what_is_kept_of_a_token(config: Any, shapes: list[KVShape]) -> None:
    assert [*probed(config()).shapes] == shapes


def test_rotations_by_type_of_layer_cap_the_context() -> None:
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0}
    config = tf.Gemma3TextConfig(**TINY, head_dim=16)
    config.rope_parameters = {"full_attention": long, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert rotation_limit(config) == ("longrope", 32)


def test_rotations_that_depend_on_the_longest_position_cap_the_context(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    module = build(tf.LlamaConfig(**TINY, max_position_embeddings=256, rope_parameters=rope))
    model = taken_over(module)
    assert model.max_context == 64
    assert "dynamic" in caplog.text


def test_a_folder_without_a_model_is_named(tmp_path: Any) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFoundError, match="no tokenizer"):
        load_model(str(tmp_path))


def test_a_checkpoint_that_was_not_copied_to_its_end_is_named(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_MODEL, tmp_path, dirs_exist_ok=True)
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(ModelNotFoundError, match="its weights cannot be loaded"):
        load_model(str(tmp_path))


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


LIKE_A_THRESHOLD = re.compile(
    r"window(_size)?$|index_topk$|block_size$|(attention|attn)_chunk_size$|floor(_scale)?$|original_max_position_embeddings$"
)
NO_THRESHOLDS = {"weight_block_size"}
"""Of quantized weights."""


def fields(values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from fields(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key


def test_each_field_that_looks_like_a_threshold_is_known() -> None:
    """A newer version of transformers may bring others, which would not be tried."""
    unknown = {
        (family, name)
        for family in {*FAMILIES} - {*NO_TEXT}
        for name in fields(AutoConfig.for_model(family).get_text_config().to_dict())
        if LIKE_A_THRESHOLD.search(name) and name not in THRESHOLD_FIELDS | NO_THRESHOLDS
    }
    assert unknown == set()


def test_thresholds_within_the_context_are_scaled_down() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=4096)
    assert thresholds(config, 32_768) == {"sliding_window": 4096}
    assert thresholds(config, 4096) == {}
    assert shrunken_config(config, threshold=12).sliding_window == 12


@pytest.mark.skipif("dory" not in FAMILIES, reason="this version of transformers has no looped layers")
def test_layers_that_are_run_several_times_stay() -> None:
    dory = shrunken_config(AutoConfig.for_model("dory"))
    assert (dory.n_input_layers, dory.n_recurrent_layers, dory.n_output_layers, dory.n_recurrent_loops) == (1, 2, 1, 2)
    assert {*dory.layer_types} == {"sliding_attention", "full_attention"}
    inkling = shrunken_config(AutoConfig.for_model("inkling2_loop_text"))
    assert (inkling.loop_layer_index_start, inkling.loop_layer_index_end) == (1, inkling.num_hidden_layers - 1)
    assert inkling.loop_num_passes == 3
