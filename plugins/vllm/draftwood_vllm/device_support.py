"""Whether the drafts of a configuration of vLLM can be made on the device, and how large they are there."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwood_vllm import hosts
from draftwood_vllm.second_runner import METHOD

if TYPE_CHECKING:
    from draftwood_memory.settings import MemorySettings

DEVICE_MODULE = "draftwood_strategies.device.trie"
STRATEGY = "trie"
"""What is drafted with."""
_ROW_TOKENS = 8192
"""Of each running request: the text that it drafts from besides its tenant's memory. Not tuned."""
_LEAST_ROW_TOKENS = 256
_TENANTS = 16
"""With memories on the device at once; another one takes the place of that used longest ago. Not tuned."""
_NODES = 4
"""Of a tree, for each token of the chain that is taken out of it. Not tuned."""
_MAX_NODES, _MAX_DEPTH = 64, 32
_SHARE = 0.1
"""Of the device's memory that drafts may take. Not tuned."""


class DeviceModule(NamedTuple):
    """The drafts on the device.

    Attributes:
        sizes: `DeviceSizes`, made of numbers by name; has `nbytes`.
        trie: `DeviceTrie`, made of sizes and a device.
    """

    sizes: Any
    trie: Any


def load() -> DeviceModule:
    """Raises ImportError: this version of draftwood-strategies, or this machine, has none."""
    module = import_module(DEVICE_MODULE)
    return DeviceModule(module.DeviceSizes, module.DeviceTrie)


def sizes_of(config: Any, settings: MemorySettings) -> dict[str, int]:
    """The fields of `DeviceSizes` for a `VllmConfig`."""
    longest = int(config.speculative_config.num_speculative_tokens)
    return {
        "rows": int(config.scheduler_config.max_num_seqs),
        "row_tokens": max(min(int(config.model_config.max_model_len), _ROW_TOKENS), _LEAST_ROW_TOKENS),
        "tenants": 1 + min(settings.max_tenants, _TENANTS),  # one of them for requests without a tenant
        "tenant_tokens": settings.memory_tokens,
        "nodes": min(_NODES * longest, _MAX_NODES),
        "depth": min(longest, _MAX_DEPTH),
    }


def nbytes_of(fields: Mapping[str, int]) -> int:
    """Bytes of drafts on the device with sizes of these fields."""
    return int(load().sizes(**fields).nbytes)


def shown(sizes: Mapping[str, int]) -> str:
    """Sizes for the log."""
    return (
        f"{sizes['rows']} rows of {sizes['row_tokens']} tokens and {sizes['tenants']} tenants of"
        f" {sizes['tenant_tokens']} tokens (max_num_seqs, DRAFTWOOD_MAX_TENANTS, DRAFTWOOD_MEMORY_TOKENS)"
    )


def refusal(config: Any, environ: Mapping[str, str]) -> str:
    """Why drafts are not made on the device with a `VllmConfig`; "" if they are.

    Raises:
        InvalidSettingError: a variable has a value that is not allowed.
    """
    if not hosts.on_cuda():
        return "there is no CUDA device"
    try:
        load()
    except ImportError as error:
        return f"there are no drafts for devices: {error}"
    from draftwood_memory.settings import read_environment

    settings = read_environment(environ, strategy=STRATEGY)
    return _unfit(config, settings) or _too_large(sizes_of(config, settings))


def _unfit(config: Any, settings: MemorySettings) -> str:
    parallel, model, speculative = config.parallel_config, config.model_config, config.speculative_config
    if settings.strategy != STRATEGY:
        return f"DRAFTWOOD_STRATEGY={settings.strategy}: only {STRATEGY} drafts on devices"
    if parallel.pipeline_parallel_size > 1:
        return f"pipeline_parallel_size={parallel.pipeline_parallel_size}: tried with 1 only"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return f"prefill_context_parallel_size={parallel.prefill_context_parallel_size}: tried with 1 only"
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return "distributed_executor_backend=external_launcher: each rank would learn by itself"
    if getattr(model, "enable_sleep_mode", False):
        return "enable_sleep_mode=True: what is learned on the device would be lost in a sleep"
    if getattr(config, "watermark_config", None) is not None:
        return "watermark_config: drafts would have to be watermarked"
    varying = speculative.num_speculative_tokens_per_batch_size or getattr(
        speculative, "enable_adaptive_verification", False
    )
    if speculative.method != METHOD:  # each row has drafts whenever it has some without us
        varying = False
    if getattr(model, "is_hybrid", False) and varying:
        # A step without drafts after one that accepted some reads a stale state: vLLM 39273, 52942. Otherwise each row
        # has a draft in each step.
        return "a recurrent model, whose states are wrong after steps that verify no drafts (vLLM issue 39273)"
    return ""


def _too_large(sizes: Mapping[str, int]) -> str:
    needed, total = nbytes_of(sizes), hosts.device_bytes()
    if needed <= total * _SHARE:
        return ""
    return (
        f"drafts for {shown(sizes)} take {needed / 2**20:.0f} MiB of the device, more than"
        f" {_SHARE:.0%} of its {total / 2**20:.0f} MiB"
    )
