"""Tiny random models: of any config class with the usual names, and with attention of other kinds."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

from draftwood_model_runner.runners.shrinking import randomized

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 12
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
ATTENTION: dict[str, Any] = {
    "windows": lambda **sizes: tf.MistralConfig(**sizes, **_GROUPED, sliding_window=WINDOW),
    "windows-in-some-layers": lambda **sizes: tf.Qwen2Config(
        **sizes, **_GROUPED, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1
    ),
    "deepseek_v2": lambda **sizes: tf.DeepseekV2Config(**sizes, **_LATENT, topk_method="greedy"),
    "deepseek_v3": lambda **sizes: tf.DeepseekV3Config(**sizes, **_LATENT, n_group=1, topk_group=1),
}
"""Models with sliding windows in all or some layers, and with latent attention."""


def build(config: Any) -> Any:
    """A random float32 model, the same each time."""
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny_attention(family: str, vocab: int, context: int) -> Any:
    """A random float32 model, the same each time."""
    return randomized(build(ATTENTION[family](**{**TINY, "vocab_size": vocab}, max_position_embeddings=context)))
