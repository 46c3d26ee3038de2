"""The text part of a multimodal checkpoint, as a causal LM of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
)

from draftwood_model_runner.runners.trials import TOLERANCE, difference

_log = logging.getLogger(__name__)
_TOKENS = 24
"""Of the text that both models are compared on."""


def is_multimodal(config: Any) -> bool:
    """Whether transformers has a model for this config that takes more than text, with a config of its own for text."""
    return config.get_text_config() is not config and type(config) in AutoModelForMultimodalLM._model_mapping


def load_text_part(config: Any, load: Callable[..., Any]) -> Any:
    """The text part of a multimodal checkpoint.

    Args:
        load: loads the checkpoint by a class of transformers, and by another config if one is given.
    """
    text_config = config.get_text_config()
    own_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if getattr(own_class, "config_class", None) is type(text_config):  # transformers renames the weights itself
        module = load(AutoModelForCausalLM)
    else:
        try:
            return text_part(load(AutoModelForMultimodalLM))
        except ImportError:  # of what computes images
            if (text_class := MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)) is None:
                raise
            module = load(text_class, config=text_config)
    _served_as(type(config).__name__, module)
    return module


@torch.inference_mode()
def text_part(whole: Any) -> Any:
    """The causal LM of transformers for the text part of a multimodal model, with its very weights.

    If transformers has none, or one that computes something else on text, this is the multimodal model itself, which
    is given text alone then. The log says which.
    """
    module = _text_model(whole)
    if module is None:
        _log.info("%s is multimodal: it is served as a whole, for text alone", type(whole).__name__)
        return whole
    _served_as(type(whole).__name__, module)
    return module


def _served_as(name: str, module: Any) -> None:
    _log.info("%s is multimodal: its text part is served, as %s", name, type(module).__name__)


def _text_model(whole: Any) -> Any | None:
    decoder, head = whole.get_decoder(), whole.get_output_embeddings()
    text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(decoder.config), None)
    if text_class is None or head is None:
        return None
    module = decoder if type(decoder) is text_class else _around(decoder, head, text_class)
    if module is None:
        return None
    module.generation_config = whole.generation_config
    if (quantization := getattr(whole.config, "quantization_config", None)) is not None:
        module.config.quantization_config = quantization
    module.eval()
    return module if _compute_alike(module, whole) else None


def _around(decoder: Any, head: Any, text_class: Any) -> Any | None:
    """A causal LM of this class with a decoder and a head; None if it has other weights besides."""
    with torch.device("meta"):
        module = text_class(decoder.config)
    places = [name for name, child in module.named_children() if type(child) is type(decoder)]
    if len(places) != 1:
        return None
    setattr(module, places[0], decoder)
    module.set_output_embeddings(head)
    return None if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())) else module


def _compute_alike(module: Any, whole: Any) -> bool:
    """Whether two models have the same logits over a text."""
    special = {value for name, value in whole.config.to_dict().items() if name.endswith(("_token_id", "_token_index"))}
    tokens = np.random.default_rng(0).integers(0, module.config.vocab_size, 2 * _TOKENS)
    text = [token for token in tokens.tolist() if token not in special][:_TOKENS]
    ids = torch.tensor([text], device=whole.device)
    try:
        expected = whole(input_ids=ids, use_cache=False).logits
    except (AttributeError, TypeError) as error:  # a defect of transformers, as that of Llama 4 in 5.24.0
        _log.warning("%s does not run on text alone, so its text part is not compared: %s", type(whole).__name__, error)
        return True
    return difference(module(input_ids=ids, use_cache=False).logits, expected) <= TOLERANCE[module.dtype]
