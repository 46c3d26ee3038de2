"""Loads a model that several GPUs share, in a process for each."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from multiprocessing.connection import Connection
from typing import Any

import torch

from draftwood_model_runner.errors import InvalidValueError, UnsupportedModelError
from draftwood_model_runner.loading.adoption import adopt, load_module
from draftwood_model_runner.loading.checkpoint import name_of
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.tokenizer import load_tokenizer
from draftwood_model_runner.runners.cuda.device.launching import require_triton

_log = logging.getLogger(__name__)


def load_sharded(path_or_id: str, device: torch.device, runner: str, size: int, options: dict[str, Any]) -> LoadedModel:
    """The model at rank 0, with all other ranks behind its runners.

    Args:
        device: its type counts; each rank takes a device of its own.
        size: of all ranks.
        options: dtype, max_context and generation_defaults of `load_model`.

    Raises:
        InvalidValueError: there are not as many devices, or the model cannot be divided by so many.
        UnsupportedModelError: it cannot be divided at all, or draft trees cannot be verified on it.
    """
    if runner not in ("auto", "cuda"):
        raise InvalidValueError("tensor_parallel", size, f"it must be 1 with runner {runner}")
    if device.type == "cuda" and size > (there := torch.cuda.device_count()):
        raise InvalidValueError("tensor_parallel", size, f"this machine has {there} CUDA devices")
    if find_spec("accelerate") is None:
        raise InvalidValueError("tensor_parallel", size, "the package accelerate is not installed")
    _check_divisible(path_or_id, size)
    require_triton(device)
    from draftwood_model_runner.runners.cuda.tensor_parallel import DriverFactory, Ranks

    ranks = Ranks(size, run_worker, path_or_id, device.type, options)
    _log.info("the model is divided among %d devices", size)
    model = _load_rank(path_or_id, device.type, options)
    return replace(model, factory=DriverFactory(model.factory, ranks))


def run_worker(commands: Connection, path_or_id: str, device: str, options: dict[str, Any]) -> None:
    """What a rank other than 0 does: loads its part, and computes what rank 0 does."""
    require_triton(torch.device(device))
    from draftwood_model_runner.runners.cuda.tensor_parallel import run_commands

    run_commands(_load_rank(path_or_id, device, options).factory, commands)


def _load_rank(path_or_id: str, device: str, options: dict[str, Any]) -> LoadedModel:
    module = load_module(path_or_id, torch.device(device), options["dtype"], **_sharding())
    return adopt(
        module,
        load_tokenizer(path_or_id),
        name=name_of(path_or_id),
        max_context=options["max_context"],
        runner="cuda",
        defaults=options["generation_defaults"],
    )


def _sharding() -> dict[str, Any]:
    """The argument that lets `from_pretrained` shard; its name changes with versions of transformers."""
    from transformers.distributed.configuration_utils import DistributedConfig

    if "tp_plan" in signature(DistributedConfig).parameters:
        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    return {"tp_plan": "auto"}


def _check_divisible(path_or_id: str, size: int) -> None:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(path_or_id).get_text_config()
    if not getattr(config, "base_model_tp_plan", None):
        raise UnsupportedModelError(f"{type(config).__name__}: transformers cannot divide it among devices")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or size
        if heads % size:
            raise InvalidValueError("tensor_parallel", size, f"it must divide the model's {name}, which are {heads}")
