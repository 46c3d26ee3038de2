"""Tiny random models of the families with recurrent layers, alone or between layers of attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftwood_model_runner.runners.shrinking import randomized

VOCAB = 128
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # else some write the last token again and again
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
_LATENT: dict[str, Any] = {
    "layer_types": _DELTA["layer_types"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_SHARED = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_LFM: dict[str, Any] = {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen4_exp_text": {
        **_DELTA,
        **_EXPERTS,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 24,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [2],
        "ngram_vocab_size_base": 64,
        "heads_per_ngram": 2,
        "split_ngram_parts": 1,
        "eos_token_id": 1,
    },
    "olmo_hybrid": _DELTA,
    "kimi_linear": {**_LATENT, "linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": {**_LATENT, "head_dim": 8, "n_group": 1, "topk_group": 1},
    "granitemoehybrid": {
        **_MAMBA2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [2]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "head_dim": 8,
        "hybrid_override_pattern": "M*M-",
        "time_step_min": 0.7,
    },
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "zamba": {"layers_block_type": _SHARED, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_key_value_heads": 4},
    "zamba2": {
        "layers_block_type": _SHARED,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 16,
        "num_key_value_heads": 4,
        "adapter_rank": 8,
        "time_step_min": 0.7,
    },
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "lfm2": _LFM,
    "lfm2_moe": {**_LFM, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "head_dim": 8,
        "sliding_window": 24,
    },
    "minimax": {
        "head_dim": 8,
        "num_local_experts": 4,
        "block_size": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 24, "head_dim": 8},
    "zaya": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "router_hidden_size": 16},
    "inkling_text": {
        "head_dim": 8,
        "swa_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "sliding_window_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "inkling2_text": {
        "head_dim": 8,
        "unpadded_vocab_size": 120,  # its head has no rows for tokens that only pad the embedding
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
"""By model type: what differs from `_SHAPE`."""


def tiny_hybrid(family: str, context: int = 256, **changes: Any) -> Any:
    """A random float32 model, the same each time.

    Args:
        context: its positions.
        changes: of the config.
    """
    shape = _SHAPE | CONFIGS[family] | {"max_position_embeddings": context} | changes
    config = AutoConfig.for_model(family, **shape)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config.get_text_config(), dtype=torch.float32)
    module.generation_config.eos_token_id = None
    return randomized(module.eval())
