"""Puts kernels that do several operations at once into a model, and fewer products.

Between two matrix products a layer of transformers launches some thirty kernels, each of which takes longer to start
than to run. What is replaced is in the table of `families`; the probe compares the logits afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwood_model_runner.runners.cuda.fusing.attention import FusedAttention
from draftwood_model_runner.runners.cuda.fusing.decoder import FusedDecoder
from draftwood_model_runner.runners.cuda.fusing.families import FAMILIES
from draftwood_model_runner.runners.cuda.fusing.mlp import FusedMLP
from draftwood_model_runner.runners.cuda.fusing.norms import LARGEST_ROW, FusedNorm

_FUSED = (FusedAttention, FusedDecoder, FusedMLP, FusedNorm)
"""What takes the place of a module's forward: an attribute of the module that it is installed on, not of its class."""
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SILU = ("silu", "swish")


def fuse(module: Any, options: Sequence[Mapping[str, Any]], exact: bool = False) -> bool:
    """Replaces the forwards of a model's parts by those that its family has; whether it has any.

    Weights become parts of larger tensors. `remove` gives the parts their own forwards back.

    Args:
        module: a model of transformers.
        options: for each layer, what it passes to attention functions.
        exact: no products are joined, as linear layers are replaced.

    Raises:
        Exception: the family's code is not what the table says.
    """
    config = module.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    if family is None or config.hidden_size > LARGEST_ROW:
        return False
    decoder = module.get_decoder()
    for name, part in decoder.named_modules():
        if name.rpartition(".")[2] in family.norms:
            part.forward = FusedNorm(part.weight, _epsilon(part), family.norms_add_one)
        elif family.mlp and {*dict(part.named_children())} >= _MLP:
            part.forward = FusedMLP(part, getattr(config, "hidden_act", None) in _SILU, join=not exact)
    if family.attention:
        for layer, of_layer in zip(decoder.layers, options, strict=True):
            layer.self_attn.forward = FusedAttention(layer.self_attn, of_layer, join=not exact)
    if family.decoder:
        decoder.forward = FusedDecoder(decoder)
    return True


def remove(module: Any) -> None:
    """Gives the parts of a model their own forwards back."""
    for part in module.modules():
        if isinstance(vars(part).get("forward"), _FUSED):
            del part.forward


def _epsilon(norm: Any) -> float:
    """By the names that Llama and Gemma have for it."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
