"""Grows a trained Llama model to a larger shape: a forward pass costs as much as its shape does, the text is unchanged.

Speed is measured at real cost on real text without a download. The weights of the small model fill a corner of those of
the large one. Added units of the residual stream stay zero. Added heads, MLP units and layers compute with random
weights, but their output weights are zero, so that they change nothing. RMSNorm averages over the hidden size, zeros
included; its weights and its epsilon are scaled accordingly. The row of an added token in the embedding and the head is
the mean of rows of the small model: its logit is the mean of their logits, which is never above the greatest.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from draftwood_model_runner.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama model that decide the cost of a forward pass, besides vocabulary and head size.

    Attributes:
        hidden: width of the residual stream.
        heads: attention heads (query heads).
        intermediate: width of the MLP.
        hybrid: three of four layers keep a state in place of keys and values, see `hybrid`.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    hybrid: bool = False

    def __str__(self) -> str:
        return f"{self.hidden}x{self.layers}x{self.heads}x{self.intermediate}"


NATIVE = "native"
_AVERAGED = 16
"""Rows in the mean that is the row of an added token. Of so many, it is far below the most probable tokens' logits."""
_MEANS_AT_ONCE = 4096
SHAPES = {
    "110m": Shape(768, 15, 12, 2048),
    "400m": Shape(1024, 24, 16, 4096),
    "1b": Shape(2048, 16, 32, 8192),
    "7b": Shape(4096, 32, 64, 11008),
    "13b": Shape(5120, 40, 80, 13824),
    "70b-layer": Shape(8192, 6, 128, 28672),
    "hybrid-100m": Shape(512, 24, 8, 1408, hybrid=True),
}
"""Shapes by their number of parameters, with the bundled model's vocabulary and heads of 64. "70b-layer" has six layers
of a model of 70B, as the bundled one cannot lose any."""


def parse_shape(text: str) -> Shape | None:
    """The shape of a name or of "HxLxHEADSxINTER"; None for "native".

    Raises:
        InvalidValueError: `text` is neither.
    """
    if text == NATIVE:
        return None
    if text in SHAPES:
        return SHAPES[text]
    numbers = text.split("x")
    if len(numbers) != 4 or not all(number.isascii() and number.isdigit() for number in numbers):
        names = ", ".join([NATIVE, *SHAPES])
        raise InvalidValueError("shape", text, f"it must be one of {names}, or HxLxHEADSxINTER")
    hidden, layers, heads, intermediate = map(int, numbers)
    return Shape(hidden, layers, heads, intermediate)


@torch.no_grad()
def widen(
    small: LlamaForCausalLM,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    context: int | None = None,
    vocabulary: int | None = None,
) -> Any:
    """A model of the larger shape with the logits of the small one, up to rounding, for the tokens of the small one.

    The small model must have no biases. Head size and the number of query heads per key head stay as they are; if the
    heads are no multiple of the latter, they are rounded down, and the width with them.

    Args:
        context: positions that it accepts; None for those of the small model. Beyond these it writes nonsense.
        vocabulary: its tokens; None for those of the small model. The added ones are never the most probable.

    Raises:
        InvalidValueError: a size is smaller than that of the small model.
    """
    large: Any
    shape = _with_whole_groups(small.config, shape)
    config = _config(small.config, shape, vocabulary)
    config.max_position_embeddings = context or config.max_position_embeddings
    if shape.hybrid:
        large = hybridized(small, shape, dtype, device, config.max_position_embeddings, config.vocab_size)
        large.generation_config = copy.deepcopy(small.generation_config)
        return large.eval()
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        large = LlamaForCausalLM._from_config(config, dtype=dtype)
    source, target = small.model, large.model
    scale = (small.config.hidden_size / shape.hidden) ** 0.5
    fill_tokens(target.embed_tokens, source.embed_tokens)
    for i, layer in enumerate(target.layers):
        _grow_layer(layer, source.layers[i] if i < len(source.layers) else None, scale)
    _grow_norm(target.norm, source.norm, scale)
    if large.lm_head.weight is not target.embed_tokens.weight:
        fill_tokens(large.lm_head, small.lm_head)
    large.generation_config = copy.deepcopy(small.generation_config)
    return large.eval()


def shape_of(config: Any) -> Shape:
    """The shape of a Llama model."""
    return Shape(config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.intermediate_size)


def _with_whole_groups(small: Any, shape: Shape) -> Shape:
    """With as many heads as are a multiple of the query heads per key head, and as wide a residual stream a head."""
    heads = shape.heads - shape.heads % (small.num_attention_heads // small.num_key_value_heads)
    return replace(shape, heads=heads, hidden=shape.hidden * heads // shape.heads)


def _config(small: Any, shape: Shape, vocabulary: int | None) -> Any:
    assert not small.attention_bias
    assert not small.mlp_bias
    native = shape_of(small)
    for name in ("hidden", "layers", "heads", "intermediate"):
        if getattr(shape, name) < getattr(native, name):
            raise InvalidValueError("shape", str(shape), f"the model grows from {native} and cannot lose {name}")
    if vocabulary is not None and vocabulary < small.vocab_size:
        raise InvalidValueError("vocabulary", vocabulary, f"the model grows from {small.vocab_size} tokens")
    group = small.num_attention_heads // small.num_key_value_heads
    config = copy.deepcopy(small)
    config.head_dim = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    config.hidden_size, config.num_hidden_layers = shape.hidden, shape.layers
    config.num_attention_heads, config.num_key_value_heads = shape.heads, shape.heads // group
    config.intermediate_size, config.vocab_size = shape.intermediate, vocabulary or small.vocab_size
    config.rms_norm_eps = small.rms_norm_eps * small.hidden_size / shape.hidden
    return config


def _grow_layer(layer: Any, source: Any | None, scale: float) -> None:
    """Without `source`, the layer adds nothing to the residual stream."""
    attention = layer.self_attn
    grow_mlp(layer.mlp, source and source.mlp)
    if source is None:
        attention.o_proj.weight.zero_()
        return
    for name in ("q_proj", "k_proj", "v_proj"):
        _grow_input(getattr(attention, name), getattr(source.self_attn, name))
    _fill(attention.o_proj, source.self_attn.o_proj)
    _grow_norm(layer.input_layernorm, source.input_layernorm, scale)
    _grow_norm(layer.post_attention_layernorm, source.post_attention_layernorm, scale)


def grow_mlp(mlp: Any, source: Any | None) -> None:
    """Without `source`, it adds nothing to the residual stream."""
    if source is None:
        mlp.down_proj.weight.zero_()
        return
    for name in ("gate_proj", "up_proj"):
        _grow_input(getattr(mlp, name), getattr(source, name))
    _fill(mlp.down_proj, source.down_proj)


def _grow_input(target: nn.Linear, source: nn.Linear) -> None:
    """Outputs of the source depend on the inputs of the source alone; the weights of added outputs stay random."""
    target.weight[: source.out_features].zero_()
    _copy_corner(target.weight, source.weight)


def _fill(target: Any, source: Any) -> None:
    """Puts the source's weight into the corner, zeros around it."""
    target.weight.zero_()
    _copy_corner(target.weight, source.weight)


def fill_tokens(target: Any, source: Any) -> None:
    """`_fill` for a weight with a row for each token: the rows of added tokens are means of the source's rows."""
    _fill(target, source)
    known, columns = source.weight.shape
    generator = torch.Generator().manual_seed(1)
    for begin in range(known, target.weight.shape[0], _MEANS_AT_ONCE):
        added = target.weight[begin : begin + _MEANS_AT_ONCE, :columns]
        rows = torch.randint(known, (added.shape[0], _AVERAGED), generator=generator)
        added.copy_(source.weight[rows.to(source.weight.device)].mean(1))


def _copy_corner(target: torch.Tensor, source: torch.Tensor) -> None:
    rows, columns = source.shape
    target[:rows, :columns] = source.to(target)


def _grow_norm(target: Any, source: Any, scale: float) -> None:
    target.weight[: source.weight.shape[0]] = source.weight.to(target.weight.device) * scale


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
    trained: Any = small.config
    config = _hybrid_config(trained, shape, positions, tokens)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        large: Any = Qwen3NextForCausalLM._from_config(config, dtype=dtype)
    scale = (trained.hidden_size / shape.hidden) ** 0.5
    fill_tokens(large.model.embed_tokens, small.model.embed_tokens)
    for i, layer in enumerate(large.model.layers):
        source = small.model.layers[i // _PERIOD] if i % _PERIOD == _PERIOD - 1 else None
        grow_mlp(layer.mlp, source and source.mlp)
        if source is None:
            layer.linear_attn.out_proj.weight.zero_()
            continue
        _grow_attention(layer.self_attn, source.self_attn, trained.head_dim)
        _grow_offset_norm(layer.input_layernorm, source.input_layernorm, scale)
        _grow_offset_norm(layer.post_attention_layernorm, source.post_attention_layernorm, scale)
    _grow_offset_norm(large.model.norm, small.model.norm, scale)
    return large


def _hybrid_config(small: Any, shape: Shape, positions: int, tokens: int) -> Qwen3NextConfig:
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


def _grow_offset_norm(target: Any, source: Any, scale: float) -> None:
    """A norm of Qwen3-Next multiplies by 1 + its weight."""
    target.weight[: source.weight.shape[0]] = source.weight.to(target.weight.device).float() * scale - 1.0
