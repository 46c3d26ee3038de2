"""Parts of a model that are replaced: small operations become one kernel, and products of one input one product.

`FAMILIES` says what can be replaced in which family. In exact mode linear layers are replaced as well, by ones whose
sums do not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from draftwood_model_runner.runners.cuda.attention import paged_attention, with_rows
from draftwood_model_runner.runners.cuda.device import LINEAR_BLOCK, SILU_BLOCK, launch, power_of_2
from draftwood_model_runner.runners.cuda.kernels.layers import linear, rms_norm, rotate, silu_product
from draftwood_model_runner.runners.model_calls import note_layer_input

LARGEST_ROW = 16_384
"""Numbers that one program normalizes: its registers hold them."""
_FOUR_WARPS = 4096
"""Numbers that the registers of four warps hold in every dtype."""
_PRE = ("input_layernorm", "post_attention_layernorm", "norm")
_POST = ("post_attention_layernorm", "post_feedforward_layernorm", "norm")
_HEADS = ("q_norm", "k_norm")
_GEMMA = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SILU = ("silu", "swish")


class FusedAttention:
    """The attention of a layer, see `Fusions.attention`.

    Args:
        options: what its own forward passes to attention functions, such as `scaling` and `sliding_window`.
        join: queries, keys and values may be one product.
    """

    def __init__(self, attention: Any, options: Mapping[str, Any], join: bool) -> None:
        self._attention, self._options = attention, options
        self._normed = hasattr(attention, "q_norm")
        self.products = ParallelLinears([attention.q_proj, attention.k_proj, attention.v_proj], join)

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """[1, T, size] of [1, T, size], and no weights; within a step.

        Args:
            position_embeddings: cosines and sines [1, T, head_size].
        """
        shape = (*hidden_states.shape[:-1], -1, self._attention.head_dim)
        query, key, value = (part.view(shape) for part in self.products(hidden_states))
        if self._normed:
            query, key = self._attention.q_norm(query), self._attention.k_norm(key)
        query, key = fused_rotation(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        output, _ = paged_attention(self._attention, query, key, value.transpose(1, 2), None, **self._options)
        return self._attention.o_proj(output.flatten(2)), None


def fused_rotation(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [1, head, T, size] and keys [1, kv_head, T, size], rotated by cosines and sines [1, T, size].

    Raises:
        ValueError: the angles are for heads of another size, or of another dtype.
    """
    query, key = with_rows(query), with_rows(key)
    _, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    if cosines.shape != (1, tokens, size) or cosines.dtype != query.dtype:
        raise ValueError(f"{cosines.dtype}{[*cosines.shape]} cosines for {query.dtype}{[*query.shape]} queries")
    queries, keys = (query.new_empty((tokens, count, size)) for count in (heads, kv_heads))
    launch(
        rotate,
        (tokens, 2),
        *(query, key, cosines.contiguous(), sines.contiguous(), queries, keys),
        *(query.stride(2), query.stride(1), key.stride(2), key.stride(1)),
        HEADS=heads,
        HEADS_BLOCK=power_of_2(heads),
        KV_HEADS=kv_heads,
        KV_HEADS_BLOCK=power_of_2(kv_heads),
        HALF=size // 2,
        BLOCK=power_of_2(size // 2),
    )
    return queries.transpose(0, 1)[None], keys.transpose(0, 1)[None]


class ParallelLinears:
    """Linear layers of one input, which are one product where they can be.

    Args:
        layers: their weights become views of one tensor if they are joined, so that no more memory is taken.
        join: whether they may be; they are if all are plain, on one device and alike in all but width.
    """

    def __init__(self, layers: Sequence[nn.Module], join: bool) -> None:
        self._layers = layers
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        plain = [layer for layer in layers if type(layer) is nn.Linear]
        if join and len(plain) == len(layers) and _alike(plain):
            self._widths = [layer.out_features for layer in plain]
            self._weight = _joined([layer.weight for layer in plain])
            self._bias = None if plain[0].bias is None else _joined([layer.bias for layer in plain])

    @property
    def joined(self) -> bool:
        """Whether they are one product."""
        return self._weight is not None

    def __call__(self, inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """The outputs [..., out_features] of each layer; those of a joined product are parts of wider rows."""
        if self._weight is None:
            return [layer(inputs) for layer in self._layers]
        parts: Sequence[torch.Tensor] = functional.linear(inputs, self._weight, self._bias).split(self._widths, -1)
        return parts


def _alike(layers: Sequence[nn.Linear]) -> bool:
    plain = all(
        {type(parameter) for parameter in layer.parameters()} == {nn.Parameter}
        and layer.weight.dtype.is_floating_point
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        for layer in layers
    )
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return plain and len(kinds) == 1


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all; each parameter becomes a view of its own."""
    # A parameter stays what it is: one of inference mode cannot be used alone with memory of another mode.
    with torch.inference_mode(parameters[0].is_inference()), torch.no_grad():
        rows = torch.cat([parameter.data for parameter in parameters])
        parts = rows.split([parameter.shape[0] for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
    if rows.device.type == "cuda":
        torch.cuda.empty_cache()  # the next weights are larger than each of those that were freed
    return rows


class FusedMLP:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)).

    Args:
        mlp: with these four modules.
        silu: the activation is SiLU, whose product is one kernel.
        join: gate and up may be one product.
    """

    def __init__(self, mlp: Any, silu: bool, join: bool) -> None:
        self._mlp, self._silu = mlp, silu
        self.products = ParallelLinears([mlp.gate_proj, mlp.up_proj], join)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] of [..., size]."""
        gate, up = self.products(x)
        product = fused_silu(gate, up) if self._silu else self._mlp.act_fn(gate) * up
        output: torch.Tensor = self._mlp.down_proj(product)
        return output


def fused_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of two tensors of one shape, which may be parts of wider rows."""
    width = gate.shape[-1]
    product = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up = gate.reshape(-1, width), up.reshape(-1, width)
    launch(
        silu_product,
        (gate.shape[0], -(-width // SILU_BLOCK)),
        *(gate, up, product, gate.stride(0), up.stride(0), width),
        BLOCK=SILU_BLOCK,
    )
    return product


class FusedNorm:
    """A norm.

    Args:
        weight: [size], at most `LARGEST_ROW`.
        add_one: 1 is added to the weight.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, add_one: bool) -> None:
        self._weight, self._epsilon, self._add_one = weight, epsilon, add_one

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., size] of [..., size]; heads [1, T, head, size] may be part of wider rows."""
        heads = hidden_states.shape[-2] if hidden_states.dim() == 4 else 1
        rows = hidden_states.reshape(-1, heads, self._weight.numel())
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        output = torch.empty_like(rows, memory_format=torch.contiguous_format)
        self._launch(rows, output, None)
        return output.view(hidden_states.shape)

    def of_sum(self, residual: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + hidden_states, all [..., size], and the norm of the sum."""
        rows, residual = hidden_states.contiguous().view(-1, 1, self._weight.numel()), residual.contiguous()
        total, output = torch.empty_like(residual), torch.empty_like(residual)
        self._launch(rows, output, (residual, total))
        return total, output

    def _launch(
        self, rows: torch.Tensor, output: torch.Tensor, addition: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        size = self._weight.numel()
        launch(
            rms_norm,
            (rows.shape[0], rows.shape[1]),
            *(rows, *(addition or (rows, output)), self._weight, output),
            *(self._epsilon, rows.stride(0), rows.stride(1)),
            SIZE=size,
            BLOCK=power_of_2(size),
            ADD_ONE=self._add_one,
            ADDED=addition is not None,
            num_warps=4 if size <= _FOUR_WARPS else 8,
        )


class FusedDecoder:
    """The embedding, all layers and the last norm of a model, see `Fusions.decoder`.

    Args:
        model: its norms are fused.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = list(model.layers[: model.config.num_hidden_layers])
        self._first, *following = (_fused(layer.input_layernorm) for layer in self._layers)
        self._following = [*following, _fused(model.norm)]
        self._middle = [_fused(layer.post_attention_layernorm) for layer in self._layers]

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> MoeModelOutputWithPast:
        """Hidden states [1, T, size] of tokens and positions int64[1, T]; within a step."""
        residual = self._model.embed_tokens(input_ids)
        rotation = self._model.rotary_emb(residual, position_ids=position_ids)
        normed = self._first(residual)
        parts = zip(self._layers, self._middle, self._following, strict=True)
        for number, (layer, middle, following) in enumerate(parts):
            note_layer_input(number, residual)
            attended, _ = layer.self_attn(
                hidden_states=normed, position_embeddings=rotation, attention_mask=None, position_ids=position_ids
            )
            residual, normed = middle.of_sum(residual, attended)
            residual, normed = following.of_sum(residual, layer.mlp(normed))
        return MoeModelOutputWithPast(last_hidden_state=normed)


def _fused(norm: Any) -> FusedNorm:
    forward = norm.forward
    assert isinstance(forward, FusedNorm)
    return forward


class Fusions(NamedTuple):
    """What is replaced in the models of a family.

    Attributes:
        norms: names of its RMS norms, which are replaced wherever they are in the decoder.
        norms_add_one: 1 is added to the weights of norms, and the product is rounded once (Gemma).
        mlp: modules with `gate_proj`, `up_proj`, `down_proj` and `act_fn` compute down(act(gate(x)) * up(x)).
        attention: `q_proj`, `k_proj` and `v_proj` of `self_attn` give whole heads, which `q_norm` and `k_norm` norm if
            it has them, and whose halves are rotated; `o_proj` ends it.
        decoder: layers are those of Llama: `input_layernorm`, `self_attn` and its residual, `post_attention_layernorm`,
            `mlp` and its residual; `norm` follows the last. All layers get the same rotation.
    """

    norms: tuple[str, ...]
    norms_add_one: bool = False
    mlp: bool = True
    attention: bool = True
    decoder: bool = False


_LLAMA = Fusions(_PRE, decoder=True)
_QWEN3 = Fusions((*_PRE, *_HEADS), decoder=True)

FAMILIES: dict[str, Fusions] = {
    **dict.fromkeys(
        ("cwm", "llama", "ministral", "mistral", "mixtral", "qwen2", "qwen2_moe", "seed_oss", "solar_open"), _LLAMA
    ),
    **dict.fromkeys(("dots1", "qwen3", "qwen3_moe"), _QWEN3),
    # Rotated in other ways, or not in all layers; with latent keys; or norms behind the rotation or over all heads.
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "helium", "ministral3"),
        Fusions(_PRE, attention=False, decoder=True),
    ),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe", "olmoe", "smollm3"), Fusions(_PRE, attention=False, decoder=True)
    ),
    "arcee": Fusions(_PRE, mlp=False, decoder=True),
    # Residuals of other forms.
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), Fusions(_PRE)),
    "bitnet": Fusions(_PRE, mlp=False, attention=False),
    **dict.fromkeys(("glm", "glm4", "phi3"), Fusions(_PRE, mlp=False, attention=False)),
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), Fusions(_POST, attention=False)),
    "gemma": Fusions(_PRE, norms_add_one=True, decoder=True),
    "gemma2": Fusions((*_GEMMA, "norm"), norms_add_one=True),
    "gemma3_text": Fusions((*_GEMMA, *_HEADS, "norm"), norms_add_one=True),
    "vaultgemma": Fusions(("input_layernorm", "pre_feedforward_layernorm", "norm"), norms_add_one=True),
}
"""The fusions of a family, by the model type of transformers."""


_FUSED = (FusedAttention, FusedDecoder, FusedMLP, FusedNorm)
"""What takes the place of a module's forward: an attribute of the module that it is installed on, not of its class."""


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
    """The epsilon of a norm, by the names that Llama and Gemma have for it."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def make_exact(module: nn.Module) -> int:
    """Replaces the linear layers of a model; returns how many. Quantized ones, and experts in one tensor, stay."""
    count = 0
    for part in module.modules():
        if type(part) is nn.Linear:
            part.forward = exact_linear(part.weight, part.bias)  # type: ignore[method-assign,assignment]
        elif type(part) is Conv1D:  # a linear layer whose weight is transposed
            part.forward = exact_linear(part.weight.T, part.bias)  # type: ignore[method-assign]
        else:
            continue
        count += 1
    return count


def exact_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer of a weight [columns, inner] and a bias [columns]."""
    columns, inner = weight.shape
    block_rows, block_columns, block_inner = LINEAR_BLOCK

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., columns] of [..., inner]."""
        hidden = hidden_states.reshape(-1, inner).contiguous()
        output = hidden.new_empty((hidden.shape[0], columns))
        if hidden.shape[0]:
            launch(
                linear,
                (-(-columns // block_columns), -(-hidden.shape[0] // block_rows)),
                *(hidden, weight, output if bias is None else bias, output),
                *(hidden.shape[0], columns, inner, weight.stride(0), weight.stride(1)),
                WITH_BIAS=bias is not None,
                ROWS=block_rows,
                COLUMNS=block_columns,
                INNER=block_inner,
            )
        return output.view(*hidden_states.shape[:-1], columns)

    return forward
