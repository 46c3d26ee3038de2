"""What the settings of each engine may be. Knows no engine: vLLM's own check of `engine_args` is made as it loads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from draftwood_model_runner.errors import InvalidInputError

if TYPE_CHECKING:
    from draftwood_service.settings import Settings

ENGINE_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    # vLLM shows no predictions beside the written tokens, so what a hybrid adds to the trie learns nothing there.
    {"vllm": MappingProxyType({"strategy": "trie"})}
)
"""Defaults of settings that are others for an engine than for Draftwood's own."""

_VLLM_REFUSES: Mapping[str, str] = MappingProxyType(
    {
        "exact": "vLLM has no exact mode",
        "runner": "runners are those of Draftwood's own engine",
        "weights": 'vLLM takes quantized checkpoints as they are, and --engine-args \'{"quantization": "fp8"}\'',
        "device": "vLLM chooses the device; CUDA_VISIBLE_DEVICES limits it",
        "threads": "OMP_NUM_THREADS and VLLM_CPU_OMP_THREADS_BIND set the threads of vLLM on CPUs",
        "shared_prefill_chunk": "vLLM has one limit of tokens for all steps, prefill_chunk",
    }
)
VLLM_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "model": "model",
        "dtype": "dtype",
        "max_model_len": "max_context",
        "max_num_seqs": "max_running",
        "tensor_parallel_size": "tensor_parallel",
        "enable_prefix_caching": "prefix_cache",
        "num_gpu_blocks_override": "kv_cache_tokens",
        "max_num_batched_tokens": "prefill_chunk",
        "generation_config": "generation_defaults",
        "speculative_config": "max_draft_nodes",
    }
)
"""Arguments of vLLM that settings stand for, with these."""


def check_engine(settings: Settings) -> None:
    """Raises InvalidInputError for a setting that the engine does not have."""
    if settings.engine == "draftwood":
        if settings.engine_args:
            problem = "are arguments of vLLM; the engine is draftwood: set --engine vllm"
            raise InvalidInputError("engine_args", None, problem)
        return
    for name, reason in _VLLM_REFUSES.items():
        default = type(settings).model_fields[name].default
        if getattr(settings, name) != default:
            raise InvalidInputError(name, getattr(settings, name), f"is not a setting of engine vllm: {reason}")
    for name in settings.engine_args:
        if (own := VLLM_ARGUMENTS.get(name)) is not None:
            raise InvalidInputError(f"engine_args[{name}]", None, f"is set by --{own.replace('_', '-')}")
