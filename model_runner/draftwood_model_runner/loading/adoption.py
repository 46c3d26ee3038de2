"""A causal LM of transformers: loaded as it is, and made servable if draft trees can be verified on it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from safetensors import SafetensorError

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.checkpoint import cannot_be_loaded
from draftwood_model_runner.loading.fingerprint import fingerprint
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.runner_choice import choose_runner
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.runners.shrinking import rotation_limit
from draftwood_model_runner.sampling.generation_defaults import eos_token_ids, generation_defaults

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = logging.getLogger(__name__)
_UNLIMITED, _UNNAMED = 2**31 - 1, 32_768
"""Tokens of context: at most, and if the model names no limit and none is set."""


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
    chosen_dtype = DTYPES.get(dtype, torch.float32 if device.type == "cpu" else "auto")

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
    except SafetensorError as error:  # as of a file that was not copied to its end
        raise cannot_be_loaded(path_or_id, error, "weights") from error
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
    grammars = tokenizer.grammars(int(config.vocab_size), ends)
    grammars.prepare()
    factory, reason = choose_runner(module, runner, exact, context, weights, threads)
    return LoadedModel(
        name=name,
        factory=factory,
        runner_reason=reason,
        tokenizer=tokenizer,
        grammars=grammars,
        architecture=type(module).__name__,
        dtype=dtype,
        weights=weights if weights != "as-is" else _quantization(config) or dtype,
        device=str(module.device),
        fingerprint=identity,
        parameters=parameters,
        vocab_size=int(config.vocab_size),
        max_context=context,
        eos_token_ids=ends,
        defaults=generation_defaults(type(module).__name__, module.generation_config, defaults, int(config.vocab_size)),
    )


def _quantization(config: Any) -> str:
    """How the weights of a checkpoint are quantized; "" if they are not."""
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method", "") if isinstance(found, dict) else getattr(found, "quant_method", "")
    return str(getattr(method, "value", method))


def configured_context(path_or_id: str, wanted: int | None) -> tuple[int, bool]:
    """The context of a model by its config.json, and whether that names a window.

    Raises:
        InvalidValueError: the context is not as long as is wanted.
        ModelNotFoundError: there is no config.json that transformers knows.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path_or_id).get_text_config()
    except (OSError, ValueError) as error:
        raise cannot_be_loaded(path_or_id, error) from error
    named = any(value and ("window" in name or "chunk" in name) for name, value in config.to_dict().items())
    return _max_context(config, wanted), named


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
