"""Grows the bundled Llama model to the shape of Qwen3-Next: three of four layers keep a state, the text is unchanged.

Every fourth layer holds a layer of the small model; the others compute with random weights and add nothing. Two parts
of Qwen3-Next's attention are made to let everything through: its gate, by a large bias, and the norms of its queries
and keys, by a further element of each head that is the same large number for every token, so that the norm is constant.
The MLPs are dense, as in Qwen3.5.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from draftwood_benchmarks.harness.widen import Shape, fill_tokens, grow_mlp

_PERIOD = 4
"""Layers to one with attention."""
_LARGE = 16384.0
"""Relative to it, the elements of queries and keys vanish in float32."""
_OPEN = 30.0
"""Of a gate: its sigmoid is 1 in float32."""


@torch.no_grad()
def hybridized(
    small: Any, shape: Shape, dtype: torch.dtype, device: torch.device | str, positions: int, tokens: int
) -> Any:
    """A hybrid model with the logits of a Llama model, up to rounding, for the tokens of the latter.

    Args:
        shape: `layers` is at least 4 times that of the small model.
        positions: that it accepts.
        tokens: of its vocabulary.
    """
    own: Any = small.config
    config = _config(own, shape, positions, tokens)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        large: Any = Qwen3NextForCausalLM._from_config(config, dtype=dtype)
    scale = (own.hidden_size / shape.hidden) ** 0.5
    fill_tokens(large.model.embed_tokens, small.model.embed_tokens)
    for i, layer in enumerate(large.model.layers):
        source = small.model.layers[i // _PERIOD] if i % _PERIOD == _PERIOD - 1 else None
        grow_mlp(layer.mlp, source and source.mlp)
        if source is None:
            layer.linear_attn.out_proj.weight.zero_()
            continue
        _grow_attention(layer.self_attn, source.self_attn, own.head_dim)
        _grow_norm(layer.input_layernorm, source.input_layernorm, scale)
        _grow_norm(layer.post_attention_layernorm, source.post_attention_layernorm, scale)
    _grow_norm(large.model.norm, small.model.norm, scale)
    return large


def _config(small: Any, shape: Shape, positions: int, tokens: int) -> Qwen3NextConfig:
    return Qwen3NextConfig(
        vocab_size=tokens,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=2 * small.head_dim,
        attention_bias=True,
        intermediate_size=shape.intermediate,
        mlp_only_layers=[*range(shape.layers)],
        linear_num_key_heads=shape.heads // 2,
        linear_num_value_heads=shape.heads,
        rope_parameters=small.rope_parameters | {"partial_rotary_factor": 0.5},
        rms_norm_eps=small.rms_norm_eps * small.hidden_size / shape.hidden,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=small.bos_token_id,
        eos_token_id=small.eos_token_id,
        pad_token_id=small.pad_token_id,
    )


def _grow_attention(target: Any, source: Any, size: int) -> None:
    """Heads of `size` become the first half of heads twice as large, of which the next element is constant."""
    heads, wide = source.q_proj.out_features // size, 2 * size
    for name, stride in (("q_proj", 2 * wide), ("k_proj", wide), ("v_proj", wide)):
        projection = getattr(target, name)
        projection.bias.zero_()
        for head in range(heads):
            begin = head * stride
            projection.weight[begin : begin + wide].zero_()
            rows = getattr(source, name).weight[head * size : (head + 1) * size]
            projection.weight[begin : begin + size, : rows.shape[1]] = rows.to(projection.weight)
        if name != "v_proj":
            projection.bias[size::stride] = _LARGE
    for head in range(target.q_proj.out_features // (2 * wide)):
        gate = slice(head * 2 * wide + wide, (head + 1) * 2 * wide)
        target.q_proj.weight[gate].zero_()
        target.q_proj.bias[gate] = _OPEN
    target.o_proj.weight.zero_()
    target.o_proj.bias.zero_()
    for head in range(heads):
        columns = source.o_proj.weight[:, head * size : (head + 1) * size]
        target.o_proj.weight[: columns.shape[0], head * wide : head * wide + size] = columns.to(target.o_proj.weight)
    length = _LARGE / wide**0.5  # root mean square of a head
    for norm, factor in ((target.q_norm, length * (wide / size) ** 0.5), (target.k_norm, length)):
        norm.weight.fill_(-1.0)
        norm.weight[:size] = factor - 1.0


def _grow_norm(target: Any, source: Any, scale: float) -> None:
    """A norm of Qwen3-Next multiplies by 1 + its weight."""
    target.weight[: source.weight.shape[0]] = source.weight.to(target.weight.device).float() * scale - 1.0
