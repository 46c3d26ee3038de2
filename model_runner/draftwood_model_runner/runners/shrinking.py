"""Small copies of a model's architecture, whose windows and thresholds can be passed within a few tokens.

Whether attention behind a window of 32,768 tokens is computed right is a property of an architecture's code, not of its
weights. So it is asked of a model of the same class with few, narrow layers, random weights, and such numbers scaled
down.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

THRESHOLD = 12
"""What windows, chunks and other thresholds are scaled down to, in tokens."""
CONTEXT = 160
"""Positions of a copy."""
THRESHOLD_FIELDS = frozenset(
    {
        "attention_chunk_size",
        "attention_window_size",
        "block_size",
        "floor_scale",
        "index_block_size",
        "index_topk",
        "keep_window_size",
        "log_scaling_n_floor",
        "original_max_position_embeddings",
        "sliding_window",
        "sliding_window_size",
        "sparse_block_size",
        "window_size",
    }
)
"""Fields of configs that count tokens, beyond which something else is computed."""
_RESCALING = frozenset({"dynamic", "longrope"})
"""Rotations that all change once any position passes the original context."""
_LAYERS = 4
_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_zero_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("topk_blocks", "index_topk_blocks"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    "n_layers_per_attn_res_block": 1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "embedding_size", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
}
"""What numbers of a config become, if they are larger."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
_COUNTING_BY_LAYER = ("compress_rates",)
"""Dictionaries of configs that give such numbers of tokens for each type of layer."""
_INNER_WIDTHS = frozenset(
    {
        "decoder_ffn_dim",
        "dense_intermediate_size",
        "encoder_ffn_dim",
        "expert_ffn_hidden_size",
        "ffn_dim",
        "ffn_hidden_size",
        "intermediate_size",
        "intermediate_size_mlp",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_inner",
        "prefix_dense_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
        "shared_intermediate_size",
    }
)
"""Widths of MLPs."""
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def rotation_limit(config: Any) -> tuple[str, int] | None:
    """The rope type and the original context of a model whose rotations all change beyond it; None for others.

    Some models have rotations for each type of layer: the least counts.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limits: list[tuple[int, str]] = []
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = parameters.get("rope_type") or parameters.get("type")
        original = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind in _RESCALING and original is not None:
            limits.append((int(original), kind))
    return min(limits)[::-1] if limits else None


def thresholds(config: Any, max_context: int) -> dict[str, int]:
    """Fields of a text config that count tokens, beyond which a model may compute something else, if it gets there.

    Args:
        max_context: positions that the model will be run on at most.
    """
    counting = {key: int(holder[key]) for holder, key in _counting_tokens(config.to_dict())}
    if rotation_limit(config):  # the context ends there
        counting.pop("original_max_position_embeddings", None)
    return {key: value for key, value in counting.items() if value < max_context}


def shrunken(module: Any) -> Any:
    """A model of the architecture of `module` with few, narrow layers: float32, on the CPU, random weights.

    Its thresholds are at most `THRESHOLD`, but for the original context of rotations that are rescaled beyond it.

    Raises:
        Exception: whatever transformers raises for a config that it does not take.
    """
    from transformers import AutoModelForCausalLM  # imports modelling code, which most loading does without

    config = shrunken_config(module.config.get_text_config())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        same_class = isinstance(config, type(module).config_class)
        copied = type(module)(config) if same_class else AutoModelForCausalLM.from_config(config)
        return randomized(copied.float().eval())


def randomized(module: Any) -> Any:
    """The module with random weights that make attention matter: scores and hidden states are about 1."""
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


def shrunken_config(config: Any, threshold: int = THRESHOLD, context: int = CONTEXT) -> Any:
    """The config of a copy, see `shrunken`; of the same class.

    Args:
        threshold: what windows and other thresholds are scaled down to, in tokens.
        context: positions of the copy.
    """
    values = copy.deepcopy(config.to_dict())
    for holder, key in _counting_tokens(values):
        if not (key == "original_max_position_embeddings" and rotation_limit(config)):
            holder[key] = min(holder[key], threshold)
    for key, value in values.items():
        if _is_number(value):
            values[key] = min(value, context if key in _POSITIONS else _SIZES.get(key, value))
            if key.endswith("_token_id"):
                values[key] = min(value, _SIZES["vocab_size"] - 1)
    values.pop("quantization_config", None)
    _shrink_layers(values)
    _shrink_widths(values, config)
    return type(config).from_dict(values)


def _counting_tokens(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Thresholds of a config and of the dictionaries in it: each with the dictionary that holds it."""
    for key, value in values.items():
        if key in _COUNTING_BY_LAYER:
            yield from ((value, kind) for kind in value)
        elif isinstance(value, dict):
            yield from _counting_tokens(value)
        elif _is_number(value) and value > 0 and key in THRESHOLD_FIELDS:
            yield values, key


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shrink_layers(values: dict[str, Any]) -> None:
    """Few layers, of each kind that a model has, those that share keys and values with others apart; lists that hold
    something for every layer are cut alike. Of layers that are run several times, two are left."""
    if "n_recurrent_layers" in values:  # Dory's dictionary counts attention and MLP as two layers
        values["layer_types"] = values["layer_types"][::2]
        values["num_hidden_layers"] //= 2
    name = next((key for key in _LAYER_COUNTS if _is_number(values.get(key))), None)
    if name is None:
        return
    layers: int = values[name]
    kinds = values.get("layer_types") or []
    unshared = layers - (values.get("num_kv_shared_layers") or 0)
    new_kinds = _first_of_each(kinds, 0, unshared) + _first_of_each(kinds, unshared, layers)
    others = [layer for layer in range(unshared) if layer not in new_kinds]
    kept = sorted(new_kinds + others[: max(0, _LAYERS - len(new_kinds))])
    if unshared < layers:
        values["num_kv_shared_layers"] = sum(layer >= unshared for layer in kept)
    for key, value in values.items():
        if isinstance(value, list) and len(value) == layers:
            values[key] = [value[layer] for layer in kept]
        elif isinstance(value, dict) and value and all(str(layer).isdigit() for layer in value):  # by layer
            values[key] = {kept.index(int(layer)): of for layer, of in value.items() if int(layer) in kept}
    if per_stack := values.get("num_layers_per_stack"):  # layers that are run several times
        values["num_layers_per_stack"], values[name] = 1, layers // per_stack
        return
    values[name] = len(kept)
    if "n_recurrent_layers" in values:
        values |= {"n_input_layers": 1, "n_recurrent_layers": len(kept) - 2, "n_output_layers": 1}
    if "loop_layer_index_end" in values:
        values |= {"loop_layer_index_start": 1, "loop_layer_index_end": len(kept) - 1}
    for key in ("first_k_dense_replace", "max_window_layers"):
        if _is_number(values.get(key)):
            values[key] = min(values[key], 1)


def _first_of_each(kinds: list[str], start: int, end: int) -> list[int]:
    """The first layer of each kind, from layer `start` to before `end`."""
    return [layer for layer in range(start, min(end, len(kinds))) if kinds[layer] not in kinds[start:layer]]


def _shrink_widths(values: dict[str, Any], config: Any) -> None:
    """Fewer heads of the same size, as factors of rotations are given for each of its elements."""
    heads_name = config.attribute_map.get("num_attention_heads", "num_attention_heads")
    width_name = config.attribute_map.get("hidden_size", "hidden_size")
    heads, width = values.get(heads_name) or 0, values.get(width_name) or 0
    if not (_is_number(heads) and _is_number(width) and heads and width):
        return
    shared: int = values.get(config.attribute_map.get("num_key_value_heads", "num_key_value_heads")) or heads
    few = min(heads, 4)
    size: int = values.get("head_dim") or 0
    free = (size and size * heads != width) or "kv_lora_rank" in values
    new_width = 128 if free else width // heads * few
    values[heads_name], values[width_name] = few, new_width
    for key in ("encoder_attention_heads", "decoder_attention_heads"):
        if key in values:
            values[key] = few
    if "qk_head_dim" in values:
        values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    if "num_key_value_heads" in values:
        values["num_key_value_heads"] = few if shared == heads else min(2, shared)
    for key, value in values.items():
        if _is_number(value) and key in _INNER_WIDTHS:
            values[key] = min(value, 2 * new_width)
        elif value == width and key in ("word_embed_proj_dim", "embedding_size"):
            values[key] = new_width
