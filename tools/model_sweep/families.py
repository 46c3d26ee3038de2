"""The families that `tools/sweep_models.py` tries: small random models of all of transformers' own causal LMs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from draftwood_model_runner.runners.shrinking import randomized, shrunken_config
from tools.model_sweep.hybrids import CONFIGS, tiny_hybrid

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
WINDOW = 40
"""What windows, chunks and other thresholds of the small models are, in tokens."""
CONTEXT = 384
"""Their positions."""

KNOWN = {
    "apertus": "Apertus 8B, 70B",
    "apertus1p5_text": "Apertus 1.5 8B",
    "arcee": "Arcee AFM 4.5B",
    "biogpt": "BioGPT",
    "bitnet": "BitNet b1.58 2B",
    "bloom": "BLOOM, BLOOMZ",
    "codegen": "CodeGen",
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A",
    "deepseek_v2": "DeepSeek V2, V2 Lite",
    "deepseek_v3": "DeepSeek V3, R1",
    "dory": "Nemotron Labs Dory 4B",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B",
    "exaone": "EXAONE 3.0, 3.5",
    "exaone4": "EXAONE 4.0",
    "falcon": "Falcon 7B, 40B",
    "falcon_h1": "Falcon H1",
    "falcon_mamba": "Falcon Mamba",
    "flex_olmo": "FlexOlmo",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma3n_text": "Gemma 3n",
    "gemma4_text": "Gemma 4",
    "glm": "GLM 4 9B",
    "glm4": "GLM 4 0414",
    "glm4_moe": "GLM 4.5, 4.6, 4.7",
    "glm4_moe_lite": "GLM 4.7 Flash",
    "gpt2": "GPT-2",
    "gpt_bigcode": "StarCoder",
    "gpt_neo": "GPT-Neo",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt_oss": "gpt-oss 20B, 120B",
    "gptj": "GPT-J 6B",
    "granite": "Granite 3, 4",
    "granitemoe": "Granite 3 MoE",
    "helium": "Helium 1",
    "hunyuan_v1_dense": "Hunyuan dense",
    "hunyuan_v1_moe": "Hunyuan A13B",
    "inkling2_loop_text": "Inkling 2 Mini",
    "internlm3": "InternLM 3",
    "jamba": "Jamba",
    "jetmoe": "JetMoE 8B",
    "lara_mini": "Lara 4 Mini",
    "lfm2": "LFM2",
    "llama": "Llama 2, 3, TinyLlama, Yi, SmolLM2",
    "llama4_text": "Llama 4",
    "mamba": "Mamba",
    "mamba2": "Mamba 2",
    "minicpm3": "MiniCPM 3",
    "minimax": "MiniMax M1",
    "minimax_m2": "MiniMax M2",
    "ministral": "Ministral 8B",
    "ministral3": "Ministral 3",
    "mistral": "Mistral 7B, Nemo, Small",
    "mixtral": "Mixtral 8x7B, 8x22B",
    "moshi": "Moshi",
    "mpt": "MPT",
    "nanochat": "nanochat",
    "nemotron": "Nemotron 4, Minitron",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "opt": "OPT",
    "persimmon": "Persimmon",
    "phi": "Phi 1, 1.5, 2",
    "phi3": "Phi 3, 3.5, 4",
    "phimoe": "Phi 3.5 MoE",
    "qwen2": "Qwen 1.5, 2, 2.5",
    "qwen2_moe": "Qwen 1.5 MoE, 2 MoE",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 MoE",
    "qwen3_next": "Qwen 3 Next",
    "recurrent_gemma": "RecurrentGemma",
    "sarvam_mla": "Sarvam 105B",
    "sarvam_moe": "Sarvam 30B",
    "seed_oss": "Seed-OSS 36B",
    "smollm3": "SmolLM3",
    "stablelm": "StableLM 2, 3B",
    "starcoder2": "StarCoder 2",
    "vaultgemma": "VaultGemma",
    "xglm": "XGLM",
}
"""By model type: well-known models of the family."""

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
_RECURRENT = frozenset({"rwkv", "xlstm"})
"""Families with a state that is in no cache of transformers."""


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


def kind_of(family: str, module: Any) -> str:
    """ "attention", "recurrent" or "hybrid": what layers a family has."""
    if family in _RECURRENT:
        return "recurrent"
    try:
        layers = DynamicCache(config=module.config).layers
    except Exception:  # a config that transformers makes no such cache for
        return "attention"
    states = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers]
    attention = any(hasattr(layer, "get_mask_sizes") for layer in layers)
    if not any(states):
        return "attention"
    return "hybrid" if attention else "recurrent"
