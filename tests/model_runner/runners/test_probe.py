"""Which models are refused, and that the reason is said."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import transformers as tf

from model_runner.errors import InvalidValueError, ModelNotFoundError, UnsupportedModelError
from model_runner.loading.model import BUNDLED_MODEL, adopt, load_model
from model_runner.loading.tokenizer import Tokenizer
from model_runner.runners.torch import attention, machine
from model_runner.runners.torch.probe import probe

_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(config: Any) -> Any:
    attention.register()
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: tf.MambaConfig(**{**_TINY, "state_size": 8}), "linear_attention"),
        (lambda: tf.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=128), "called attention 0 times"),
        (lambda: tf.Llama4TextConfig(**_TINY, num_local_experts=2), "chunked_attention"),
    ],
)
def test_refused_with_the_reason(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        probe(build(config()), exact=False)


def test_a_model_whose_logits_depend_on_more_than_attention_is_refused() -> None:
    """What a node computes must not depend on the nodes beside it: here each row sees its neighbour's state."""
    module = build(tf.LlamaConfig(**_TINY))
    module.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out: out + 0.1 * out.roll(1, dims=1))
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        probe(module, exact=False)


def test_a_hidden_sliding_window_is_refused() -> None:
    """The window reaches the model's own mask, but not the attention function."""
    sliding: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    module = build(tf.Qwen2Config(**_TINY, num_key_value_heads=2, **sliding))
    module.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="hides the sliding window of layer 1"):
        probe(module, exact=False)


def test_attention_sinks_are_served() -> None:
    config = tf.GptOssConfig(**_TINY, num_key_value_heads=2, head_dim=16, num_local_experts=4)
    assert probe(build(config), exact=False).kv_heads == 2


def test_rotations_that_depend_on_the_longest_position_cap_the_context(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    module = build(tf.LlamaConfig(**_TINY, max_position_embeddings=256, rope_parameters=rope))
    model = adopt(module, Tokenizer(tf.AutoTokenizer.from_pretrained(BUNDLED_MODEL)), name="dynamic")
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
    with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
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
    module = build(tf.LlamaConfig(**_TINY)).to(torch.bfloat16)
    module.register_forward_pre_hook(lambda *_: seen.append(all(name in os.environ for name in machine.KERNEL_CACHES)))
    probe(module, exact=False)
    assert seen
    assert all(seen)
    for name in machine.KERNEL_CACHES:
        monkeypatch.delenv(name)
