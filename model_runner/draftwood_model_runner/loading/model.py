"""Loads an unmodified transformers causal LM, and refuses one that trees cannot be verified on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL, cannot_be_loaded, name_of, require_folder
from draftwood_model_runner.loading.fingerprint import fingerprint
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.prepared import Prepared, prepared_model
from draftwood_model_runner.loading.runner_choice import check_runner, check_weights, choose_runner
from draftwood_model_runner.loading.sharded import load_sharded
from draftwood_model_runner.loading.tokenizer import Tokenizer, load_tokenizer
from draftwood_model_runner.runners.capacity.threads import default_threads
from draftwood_model_runner.runners.shrinking import rotation_limit
from draftwood_model_runner.sampling.generation_defaults import SOURCES, eos_token_ids
from draftwood_model_runner.sampling.generation_defaults import generation_defaults as read_defaults

__all__ = ["BUNDLED_MODEL", "LoadedModel", "adopt", "load_model"]

_log = logging.getLogger(__name__)
_UNLIMITED, _UNNAMED = 2**31 - 1, 32_768
"""Tokens of context: at most, and if the model names no limit and none is set."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        weights: "as-is": in `dtype`; "int8" or "int4": quantized to 8 or 4 bits, by the openvino runner alone. Drafts
            then change nothing about what the quantized model writes.
        generation_defaults: "model" takes defaults of requests from the model's generation config, "greedy" ignores it.
        threads: CPU threads that the model is loaded and its steps are computed with; None for the default of torch,
            within the CPU quota of the container. Another number for steps costs a second compilation.
        tensor_parallel: GPUs of this machine that share the model, with the cuda runner; starts a process for each of
            the others. This process ends if one of them does.
        cache: folder of converted models, see `loading.prepared`; None for none.

    Raises:
        InvalidValueError: device, dtype, max_context, runner, weights, generation_defaults or tensor_parallel is not
            allowed, the runner has no exact mode, or the model cannot be computed with such weights; gives the reason.
        ModelNotFoundError: there is no such model.
        UnsupportedRunnerError: OpenVINO is chosen by name and cannot compute the model; gives the reason.
        UnsupportedModelError: draft trees cannot be verified on it; gives the reason.
    """
    chosen_device = _device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise InvalidValueError("dtype", dtype, f"it must be one of auto, {', '.join(_DTYPES)}")
    check_runner(runner, exact)
    check_weights(weights, runner, exact)
    if generation_defaults not in SOURCES:
        raise InvalidValueError("generation_defaults", generation_defaults, f"it must be one of {', '.join(SOURCES)}")
    require_folder(path_or_id)
    threads = threads or default_threads()
    torch.set_num_threads(threads)
    if tensor_parallel > 1:
        if exact:
            raise InvalidValueError("exact", exact, f"tensor_parallel is {tensor_parallel}; exact mode needs 1")
        options = {"dtype": dtype, "max_context": max_context, "generation_defaults": generation_defaults}
        return load_sharded(path_or_id, chosen_device, runner, tensor_parallel, options)
    prepared: Prepared | None = None
    if cache is not None and chosen_device.type == "cpu" and runner != "torch" and not exact:
        prepared = prepared_model(
            cache,
            path_or_id,
            dtype=dtype,
            max_context=max_context,
            runner=runner,
            weights=weights,
            generation_defaults=generation_defaults,
            threads=threads,
        )
    tokenizer = load_tokenizer(path_or_id)
    if prepared is not None and (found := prepared.load(tokenizer, name_of(path_or_id), threads)) is not None:
        return found
    model = adopt(
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
    if prepared is not None:
        prepared.save(model)
    return model


def load_module(path_or_id: str, device: torch.device, dtype: str, **options: Any) -> Any:
    """The model of transformers; of a multimodal one its text part.

    Args:
        options: of `from_pretrained`.

    Raises:
        ModelNotFoundError: there is no such model, or its files lack weights.
    """
    # Imports the modelling code of transformers, which a model in the cache does without.
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from draftwood_model_runner.loading.text_part import is_multimodal, load_text_part

    disable_progress_bar()
    chosen_dtype = _DTYPES.get(dtype, torch.float32 if device.type == "cpu" else "auto")

    def load(loader: Any, **others: Any) -> Any:
        module, info = loader.from_pretrained(
            path_or_id, dtype=chosen_dtype, output_loading_info=True, **options, **others
        )
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"its files have no weights for {missing[0]}, {len(missing)} in all")
        return (module if options else module.to(device)).eval()

    try:
        config = AutoConfig.from_pretrained(path_or_id)
        if not options and _quantization(config):
            # Some are laid out for the device that they are loaded on, and cannot be moved.
            options = {"device_map": {"": device}}
        return load_text_part(config, load) if is_multimodal(config) else load(AutoModelForCausalLM)
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # ImportError: of what reads quantized weights
        raise cannot_be_loaded(path_or_id, error) from error


def adopt(
    module: Any,
    tokenizer: Tokenizer,
    *,
    name: str,
    max_context: int | None = None,
    exact: bool | None = None,
    runner: str = "torch",
    weights: str = "as-is",
    defaults: str = "model",
    threads: int | None = None,
) -> LoadedModel:
    """Makes a transformers model in memory servable: checks that trees can be verified on it, and takes it over.

    Args:
        max_context, exact, runner, weights, threads: as for `load_model`. The torch runner changes the module,
            OpenVINO does not.
        defaults: as generation_defaults there.

    Raises:
        InvalidValueError: max_context, runner or weights is not allowed, or the runner has no exact mode.
        UnsupportedModelError: draft trees cannot be verified on the model; gives the reason.
    """
    config: Any = module.config.get_text_config()
    context = _max_context(config, max_context)
    parameters = sum(p.numel() for p in module.parameters())
    dtype = str(module.dtype).removeprefix("torch.")
    identity = fingerprint(module, tokenizer)
    ends = eos_token_ids(module)
    tokenizer.check_ends(ends)
    factory, reason = choose_runner(module, runner, exact, context, weights, threads)
    return LoadedModel(
        name=name,
        factory=factory,
        runner_reason=reason,
        tokenizer=tokenizer,
        grammars=tokenizer.grammars(int(config.vocab_size), ends),
        architecture=type(module).__name__,
        dtype=dtype,
        weights=weights if weights != "as-is" else _quantization(config) or dtype,
        device=str(module.device),
        fingerprint=identity,
        parameters=parameters,
        vocab_size=int(config.vocab_size),
        max_context=context,
        eos_token_ids=ends,
        defaults=read_defaults(type(module).__name__, module.generation_config, defaults),
    )


def _quantization(config: Any) -> str:
    """How the weights of a checkpoint are quantized; "" if they are not."""
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method", "") if isinstance(found, dict) else getattr(found, "quant_method", "")
    return str(getattr(method, "value", method))


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


def _max_context(config: Any, wanted: int | None) -> int:
    """The model's context, up to the position at which rotations would depend on the batch."""
    names = ("max_position_embeddings", "max_target_positions")  # the second in Whisper
    limit = next((int(found) for name in names if (found := getattr(config, name, None) or 0) > 0), _UNLIMITED)
    # Another request's positions would change all rotations of ours.
    if (rescaled := rotation_limit(config)) and rescaled[1] < limit:
        kind, limit = rescaled
        _log.warning("rope type %s: the context is limited to %d tokens", kind, limit)
    if wanted is None and limit == _UNLIMITED:  # as in recurrent models
        _log.warning("the model names no context: it is limited to %d tokens, unless max_context is set", _UNNAMED)
        return _UNNAMED
    if wanted is None:
        return limit
    if not 2 <= wanted <= limit:
        raise InvalidValueError("max_context", wanted, f"it must lie in [2, {limit}] for this model")
    return wanted
