"""Grows a trained Llama model to a larger shape: a forward pass costs as much as its shape does, the text is unchanged.

So a run on a GPU measures real cost on real text without a download. The weights of the small model fill a corner of
those of the large one. Added units of the residual stream stay zero. Added heads, MLP units and layers compute with
random weights, but their output weights are zero, so that they change nothing. RMSNorm averages over the hidden size,
zeros included; its weights and its epsilon are scaled accordingly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from draftwood_benchmarks.harness.models import ChosenModel
from draftwood_benchmarks.harness.report import console
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama model that decide the cost of a forward pass, besides vocabulary and head size.

    Attributes:
        hidden: width of the residual stream.
        heads: attention heads (query heads).
        intermediate: width of the MLP.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int

    def __str__(self) -> str:
        return "x".join(map(str, astuple(self)))


SHAPES = {
    "native": None,
    "110m": Shape(768, 15, 12, 2048),
    "1b": Shape(2048, 16, 32, 8192),
    "7b": Shape(4096, 32, 64, 11008),
    "13b": Shape(5120, 40, 80, 13824),
    "70b-layer": Shape(8192, 6, 128, 28672),
}
"""Shapes by their number of parameters, with the bundled model's vocabulary and heads of 64. "70b-layer" has six layers
of a model of 70B, as the bundled one cannot lose any."""


def parse_shape(text: str) -> Shape | None:
    """The shape of a name or of "HxLxHEADSxINTER"; None for "native".

    Raises:
        InvalidValueError: `text` is neither.
    """
    if text in SHAPES:
        return SHAPES[text]
    numbers = text.split("x")
    if len(numbers) != 4 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise InvalidValueError("shape", text, f"it must be one of {', '.join(SHAPES)}, or HxLxHEADSxINTER")
    return Shape(*map(int, numbers))


@contextmanager
def grown(chosen: ChosenModel, shape: str, positions: int) -> Iterator[ChosenModel]:
    """The model in this shape, in a temporary folder from which transformers, our engine and vLLM load it.

    Args:
        positions: that it shall accept; beyond those of the small model it writes nonsense.

    Raises:
        InvalidInputError: the small model is no Llama, which alone can be grown.
        InvalidValueError: there is no such shape, or a size is smaller than that of the small model.
    """
    wanted = parse_shape(shape)
    if (kind := AutoConfig.from_pretrained(chosen.path).model_type) != "llama":
        raise InvalidInputError("--model", chosen.path, f"only a Llama can be grown, and this is of type {kind}")
    disable_progress_bar()
    name = f"{chosen.name}, shape {shape}"
    with TemporaryDirectory(prefix="draftwood-") as folder:
        with console.status(f"Growing the {name}"):
            small = LlamaForCausalLM.from_pretrained(chosen.path, dtype="auto")
            dtype = small.dtype if chosen.options.dtype == "auto" else getattr(torch, chosen.options.dtype)
            where = "cuda" if torch.cuda.is_available() else "cpu"
            widen(small.float(), wanted or shape_of(small.config), dtype, where, positions).save_pretrained(folder)
            AutoTokenizer.from_pretrained(chosen.path).save_pretrained(folder)
        yield replace(chosen, name=name, path=folder)


@torch.no_grad()
def widen(
    small: LlamaForCausalLM,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    positions: int | None = None,
) -> Any:
    """A model of the larger shape with the logits of the small one, up to rounding.

    The small model must have no biases. Head size and the number of query heads per key head stay as they are; if the
    heads are no multiple of the latter, they are rounded down, and the width with them.

    Raises:
        InvalidValueError: a size is smaller than that of the small model.
    """
    shape = _with_whole_groups(small.config, shape)
    config = _config(small.config, shape)
    config.max_position_embeddings = positions or config.max_position_embeddings
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        large: Any = LlamaForCausalLM._from_config(config, dtype=dtype)
    source, target = small.model, large.model
    scale = (small.config.hidden_size / shape.hidden) ** 0.5
    _fill(target.embed_tokens, source.embed_tokens)
    for i, layer in enumerate(target.layers):
        _grow_layer(layer, source.layers[i] if i < len(source.layers) else None, scale)
    _grow_norm(target.norm, source.norm, scale)
    if large.lm_head.weight is not target.embed_tokens.weight:
        _fill(large.lm_head, small.lm_head)
    large.generation_config = copy.deepcopy(small.generation_config)
    return large.eval()


def shape_of(config: Any) -> Shape:
    """The shape of a Llama model."""
    return Shape(config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.intermediate_size)


def _with_whole_groups(small: Any, shape: Shape) -> Shape:
    """With as many heads as are a multiple of the query heads per key head, and as wide a residual stream a head."""
    heads = shape.heads - shape.heads % (small.num_attention_heads // small.num_key_value_heads)
    return replace(shape, heads=heads, hidden=shape.hidden * heads // shape.heads)


def _config(small: Any, shape: Shape) -> Any:
    assert not small.attention_bias
    assert not small.mlp_bias
    native = shape_of(small)
    for size in fields(Shape):
        if getattr(shape, size.name) < getattr(native, size.name):
            raise InvalidValueError("shape", str(shape), f"the model grows from {native} and cannot lose {size.name}")
    group = small.num_attention_heads // small.num_key_value_heads
    config = copy.deepcopy(small)
    config.head_dim = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    config.hidden_size, config.num_hidden_layers = shape.hidden, shape.layers
    config.num_attention_heads, config.num_key_value_heads = shape.heads, shape.heads // group
    config.intermediate_size = shape.intermediate
    config.rms_norm_eps = small.rms_norm_eps * small.hidden_size / shape.hidden
    return config


def _grow_layer(layer: Any, source: Any | None, scale: float) -> None:
    """Without `source`, the layer adds nothing to the residual stream."""
    attention, mlp = layer.self_attn, layer.mlp
    if source is None:
        attention.o_proj.weight.zero_()
        mlp.down_proj.weight.zero_()
        return
    for name in ("q_proj", "k_proj", "v_proj"):
        _grow_input(getattr(attention, name), getattr(source.self_attn, name))
    for name in ("gate_proj", "up_proj"):
        _grow_input(getattr(mlp, name), getattr(source.mlp, name))
    _fill(attention.o_proj, source.self_attn.o_proj)
    _fill(mlp.down_proj, source.mlp.down_proj)
    _grow_norm(layer.input_layernorm, source.input_layernorm, scale)
    _grow_norm(layer.post_attention_layernorm, source.post_attention_layernorm, scale)


def _grow_input(target: nn.Linear, source: nn.Linear) -> None:
    """Outputs of the source depend on the inputs of the source alone; the weights of added outputs stay random."""
    target.weight[: source.out_features].zero_()
    _copy_corner(target.weight, source.weight)


def _fill(target: Any, source: Any) -> None:
    """Puts the source's weight into the corner, zeros around it."""
    target.weight.zero_()
    _copy_corner(target.weight, source.weight)


def _copy_corner(target: torch.Tensor, source: torch.Tensor) -> None:
    rows, columns = source.shape
    target[:rows, :columns] = source.to(target)


def _grow_norm(target: Any, source: Any, scale: float) -> None:
    target.weight[: source.weight.shape[0]] = source.weight.to(target.weight.device) * scale
