"""Loads an unmodified transformers causal LM, and refuses one that trees cannot be verified on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from draftwood_model_runner.engine_config import MODEL_CACHE_BYTES, check_runner, check_weights, no_head_reason
from draftwood_model_runner.errors import InvalidValueError, UnsupportedModelError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL, name_of, require_folder
from draftwood_model_runner.loading.conversion_cache import entry_of, is_intact, load_entry, save_entry, tokenizer_of
from draftwood_model_runner.loading.draft_models import (
    DRAFT_MODEL,
    HEAD,
    check_draft_model,
    head_drafter,
    left_out_if_unchosen,
    model_drafter,
    naming_draft_model,
    read_head,
)
from draftwood_model_runner.loading.loaded import DTYPES, LoadedModel, adopt, load_module
from draftwood_model_runner.loading.sources import NO_HEAD
from draftwood_model_runner.loading.tokenizer import Tokenizer, load_tokenizer
from draftwood_model_runner.runners.cuda.device import require_triton
from draftwood_model_runner.runners.machine import default_threads
from draftwood_model_runner.sampling.generation_defaults import SOURCES

__all__ = ["BUNDLED_MODEL", "LoadedModel", "adopt", "load_model"]

_log = logging.getLogger(__name__)


def load_model(
    path_or_id: str = BUNDLED_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_context: int | None = None,
    exact: bool | None = None,
    runner: str = "auto",
    weights: str = "as-is",
    generation_defaults: str = "model",
    threads: int | None = None,
    tensor_parallel: int = 1,
    cache: Path | None = None,
    cache_bytes: int = MODEL_CACHE_BYTES,
    draft_model: str | None = None,
    draft_head: str = NO_HEAD,
) -> LoadedModel:
    """Loads a model and its tokenizer from a folder or from the hub (its cache, where the network is out of reach).

    Args:
        device: "cpu", "cuda", "cuda:1", ...; "auto" takes CUDA if there is a device.
        dtype: "float32", "bfloat16" or "float16"; "auto" is float32 on a CPU and the checkpoint's own elsewhere.
        max_context: a smaller context than the model's own.
        exact: compute so that rounding does not depend on drafts and batch, by the torch runner on CPUs or the cuda
            runner. None does so where the torch runner is used on a CPU and the model computes in less than float32:
            there rounding decides tokens.
        runner: "openvino", "torch", or "auto": OpenVINO on a CPU, if it is installed, `exact` is not asked for, and its
            logits are those of the model; else torch.
        weights: "as-is": in `dtype`; "int8" or "int4": quantized to 8 or 4 bits, by the openvino runner alone.
        generation_defaults: "model" takes defaults of requests from the model's generation config, "greedy" ignores it.
        threads: CPU threads that the model is loaded and its steps are computed with; None for the default of torch,
            within the CPU quota of the container. Another number for steps costs a second compilation.
        tensor_parallel: GPUs of this machine that share the model, with the cuda runner; starts a process for each of
            the others. This process ends if one of them does.
        cache, cache_bytes: folder of converted models, see `loading.conversion_cache`, or None for none, and the size
            of all of them at most.
        draft_model: folder or id of a smaller model of the same vocabulary, which drafts; None for none.
        draft_head: folder of a draft head for this model; "mtp" for the module for multi-token prediction of its
            checkpoint; "auto" for the head that this package has for it, or else this module, if there is one that can
            be computed here; or "none".

    Raises:
        InvalidValueError: device, dtype, max_context, runner, weights, generation_defaults, tensor_parallel,
            draft_model or draft_head is not allowed, the runner has no exact mode, or the model cannot be computed with
            such weights; gives the reason.
        ModelNotFoundError: there is no such model.
        UnsupportedRunnerError: OpenVINO is chosen by name and cannot compute the model; gives the reason.
        UnsupportedModelError: draft trees cannot be verified on it; gives the reason.
    """
    chosen_device = _device(device)
    _check_choice("dtype", dtype, ("auto", *DTYPES))
    check_runner(runner, exact)
    check_weights(weights, runner, exact)
    _check_choice("generation_defaults", generation_defaults, SOURCES)
    require_folder(path_or_id)
    threads = threads or default_threads()
    torch.set_num_threads(threads)
    head = read_head(draft_head, path_or_id, no_head_reason(tensor_parallel))
    feature_layers = () if head is None else head.feature_layers_of_target
    if draft_model is not None:
        if tensor_parallel > 1:
            problem = f"it must be unset, since tensor_parallel is {tensor_parallel}"
            raise InvalidValueError("draft_model", draft_model, problem)
        check_draft_model(draft_model, path_or_id, max_context)
    if tensor_parallel > 1:
        if exact:
            raise InvalidValueError("exact", exact, f"tensor_parallel is {tensor_parallel}; exact mode needs 1")
        options = {"dtype": dtype, "max_context": max_context, "generation_defaults": generation_defaults}
        return load_sharded(path_or_id, chosen_device, runner, tensor_parallel, options)
    entry: Path | None = None
    if cache is not None and chosen_device.type == "cpu" and runner != "torch" and not exact:
        entry = entry_of(
            cache,
            path_or_id,
            dtype=dtype,
            max_context=max_context,
            runner=runner,
            weights=weights,
            generation_defaults=generation_defaults,
            threads=threads,
            feature_layers=feature_layers,
        )

    def convert(tokenizer: Tokenizer) -> LoadedModel:
        return adopt(
            load_module(path_or_id, chosen_device, dtype),
            tokenizer,
            name=name_of(path_or_id),
            max_context=max_context,
            exact=exact,
            runner=runner,
            weights=weights,
            defaults=generation_defaults,
            threads=threads,
            feature_layers=feature_layers,
        )

    if entry is None:
        model = convert(load_tokenizer(path_or_id))
    else:
        model = _kept(entry, path_or_id, threads, cache_bytes, convert)
    drafters = {}
    if head is not None:
        with left_out_if_unchosen(draft_head):
            drafters[HEAD] = head_drafter(head, path_or_id, model, threads)
    if draft_model is not None:
        with naming_draft_model(draft_model):
            draft = load_model(
                draft_model,
                device=device,
                dtype=dtype,
                max_context=max_context,
                runner=model.runner_name,
                threads=threads,
                cache=cache,
                cache_bytes=cache_bytes,
            )
        drafters[DRAFT_MODEL] = model_drafter(draft, model, draft_model)
    return replace(model, drafters=drafters) if drafters else model


def _check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raises InvalidValueError for a value that is not allowed."""
    if value not in (choices := tuple(allowed)):
        raise InvalidValueError(name, value, f"it must be one of {', '.join(choices)}")


def _kept(
    entry: Path, path_or_id: str, threads: int, cache_bytes: int, convert: Callable[[Tokenizer], LoadedModel]
) -> LoadedModel:
    """The model of an entry of the cache, which is written if it is not there."""
    with ThreadPoolExecutor(1) as beside:
        checking = beside.submit(is_intact, entry)
        kept_tokenizer = tokenizer_of(entry, path_or_id)
    intact = checking.result()
    tokenizer = kept_tokenizer if intact and kept_tokenizer is not None else load_tokenizer(path_or_id)
    if intact and (kept := load_entry(entry, tokenizer, name_of(path_or_id), threads)) is not None:
        tokenizer.check_ends(kept.eos_token_ids)
        return kept
    model = convert(tokenizer)
    if not save_entry(entry, model, cache_bytes):
        return model
    # As at later starts its weights are in a mapped file, which the system may drop and read again.
    del model
    return load_entry(entry, tokenizer, name_of(path_or_id), threads) or convert(tokenizer)


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidValueError("device", device, "it must be auto, cpu, cuda or cuda:N") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InvalidValueError("device", device, f"this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen


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
