"""The families that `tools/sweep_models.py` tries: small random models of transformers' own classes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftwood_model_runner.runners.shrinking import randomized, shrunken_config

FAMILIES = {
    "apertus": "Apertus 8B, 70B",
    "arcee": "Arcee AFM 4.5B",
    "biogpt": "BioGPT",
    "bitnet": "BitNet b1.58 2B",
    "bloom": "BLOOM, BLOOMZ",
    "codegen": "CodeGen",
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A",
    "deepseek_v2": "DeepSeek V2, V2 Lite",
    "deepseek_v3": "DeepSeek V3, R1",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B",
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
    "internlm3": "InternLM 3",
    "jamba": "Jamba",
    "jetmoe": "JetMoE 8B",
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
    "seed_oss": "Seed-OSS 36B",
    "smollm3": "SmolLM3",
    "stablelm": "StableLM 2, 3B",
    "starcoder2": "StarCoder 2",
    "vaultgemma": "VaultGemma",
    "xglm": "XGLM",
}
"""By model type: well-known models of the family."""

_CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "ministral": {"head_dim": 32},
    "phimoe": {"sliding_window": 2047},
}
"""Where the defaults of transformers make no model that runs, or not the one that was published."""


def small_model(family: str) -> Any:
    """A random float32 model, the same each time, with windows and thresholds of a few tokens.

    Raises:
        Exception: whatever transformers raises for a config that it does not take.
    """
    config = AutoConfig.for_model(family, **_CHANGES.get(family, {})).get_text_config()
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = classes[0] if isinstance(classes, tuple) else classes
    torch.manual_seed(0)
    return randomized(model_class(shrunken_config(config)).float().eval())
