"""Small random models: of all causal language models of transformers, of config classes with the usual names, and with
attention of other kinds."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from draftwood_model_runner.runners.shrinking import randomized, shrunken_config

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


FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
WINDOW = 40
"""What windows, chunks and other thresholds of the small models are, in tokens."""
CONTEXT = 384
"""Their positions."""


_TINY_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "blenderbot": {"encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 512},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "cpmant": {"dim_ff": 256},
    "ctrl": {"n_positions": 512},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gemma3n": {"text_config": {"intermediate_size": 256}},
    "gemma3n_text": {"intermediate_size": 256},
    "git": {"vision_config": _TINY_VISION},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "ministral": {"head_dim": 32},
    "phi4_multimodal": {
        "rope_parameters": _LONGROPE,
        "vision_config": _TINY_VISION,
        "audio_config": {"hidden_size": 32, "intermediate_size": 64, "num_blocks": 1, "num_attention_heads": 2},
    },
    "phimoe": {"sliding_window": 2047},
    "reformer": {"axial_pos_embds": False, "hidden_size": 256, "is_decoder": True, "attn_layers": ["local", "lsh"]},
    "rwkv": {"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_heads": 4, "num_blocks": 2, "num_hidden_layers": 2},
    "xmod": {"default_language": "en_XX"},
}
"""Where the defaults of transformers make no model that runs, one that is too large, or not the one that was
published."""
_CODES = "writes several audio codes in each step, which are no sequence of tokens"
_PATCHES = "groups the bytes of each forward pass into patches, so a draft would change the groups of what is before it"
_ASSISTANT = "drafts for another model from its hidden states, and writes no text by itself"
NO_TEXT = {
    "blt": _PATCHES,
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "musicgen": _CODES,
    "musicgen_melody": _CODES,
}
"""Families that are no model of a sequence of tokens, with the reason."""


def small_model(family: str) -> Any:
    """A random float32 model, the same each time, with windows and thresholds of `WINDOW` tokens.

    Raises:
        Exception: whatever transformers raises for a config that it does not take.
    """
    for name in (family, f"{family}_text"):
        if name in CONFIGS:
            return tiny_hybrid(name, CONTEXT)
    whole = AutoConfig.for_model(family, **_CHANGES.get(family, {}))
    config = whole.get_text_config()
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or MODEL_FOR_CAUSAL_LM_MAPPING[type(whole)]
    model_class = classes[0] if isinstance(classes, tuple) else classes
    torch.manual_seed(0)
    small = shrunken_config(config, WINDOW, CONTEXT)
    small.tie_word_embeddings = False  # tied, a random model repeats its last token
    return randomized(model_class(small).float().eval())


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
SHORT_WINDOW = 12
"""Of the models in `ATTENTION`, in tokens."""
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
_DEEPSEEK: dict[str, Any] = {
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
    "windows": lambda **sizes: tf.MistralConfig(**sizes, **_GROUPED, sliding_window=SHORT_WINDOW),
    "windows-in-some-layers": lambda **sizes: tf.Qwen2Config(
        **sizes, **_GROUPED, sliding_window=SHORT_WINDOW, use_sliding_window=True, max_window_layers=1
    ),
    "deepseek_v2": lambda **sizes: tf.DeepseekV2Config(**sizes, **_DEEPSEEK, topk_method="greedy"),
    "deepseek_v3": lambda **sizes: tf.DeepseekV3Config(**sizes, **_DEEPSEEK, n_group=1, topk_group=1),
}
"""Models with sliding windows in all or some layers, and with latent attention."""


def build(config: Any) -> Any:
    """A random float32 model, the same each time."""
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny_attention(family: str, vocab: int, context: int) -> Any:
    """A random float32 model, the same each time."""
    return randomized(build(ATTENTION[family](**{**TINY, "vocab_size": vocab}, max_position_embeddings=context)))
