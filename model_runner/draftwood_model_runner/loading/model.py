"""Loads an unmodified transformers causal LM, and refuses one that trees cannot be verified on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from draftwood_model_runner.engine_config import MODEL_CACHE_BYTES, check_runner, check_weights
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.adoption import DTYPES, adopt, load_module
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL, name_of, require_folder
from draftwood_model_runner.loading.conversion_cache import entry_of, is_intact, load_entry, save_entry, tokenizer_of
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.sharded import load_sharded
from draftwood_model_runner.loading.tokenizer import Tokenizer, load_tokenizer
from draftwood_model_runner.runners.capacity.host import default_threads
from draftwood_model_runner.sampling.generation_defaults import SOURCES

__all__ = ["BUNDLED_MODEL", "LoadedModel", "adopt", "load_model"]


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

    Raises:
        InvalidValueError: device, dtype, max_context, runner, weights, generation_defaults or tensor_parallel is not
            allowed, the runner has no exact mode, or the model cannot be computed with such weights; gives the reason.
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
        )

    if entry is None:
        return convert(load_tokenizer(path_or_id))
    return _kept(entry, path_or_id, threads, cache_bytes, convert)


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
    if intact and (found := load_entry(entry, tokenizer, name_of(path_or_id), threads)) is not None:
        tokenizer.check_ends(found.eos_token_ids)
        return found
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
