"""OpenVINO's operator PagedAttention: built while a model is converted, and given its inputs afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension

from draftwood_model_runner.runners.openvino.kv_pages import PageLayout


class ConvertedModel(NamedTuple):
    """A model with paged tree attention.

    Attributes:
        model: its inputs are input_ids int64[T, 1], position_ids int64[T, 1], logit_rows int64[R] and those of
            `PARAMETERS`, its output is logits float32[R, vocab].
        layout: the shape of its pages.
        window: tokens that some layer attends to, if those are fewer than the positions that the model is run on.
        in_every_layer: each layer has this window.
    """

    model: ov.Model
    layout: PageLayout
    window: int | None
    in_every_layer: bool


OPERATOR = "draftwood::paged_attention"
"""The torch operator that stands for it in a traced model."""

_KEY_CACHE, _VALUE_CACHE = 3, 4
_SCALE, _WINDOW = 9, 10
PARAMETERS: dict[int, tuple[str, Any, list[int]]] = {
    5: ("past_lens", ov.Type.i32, [-1]),
    6: ("subsequence_begins", ov.Type.i32, [-1]),
    7: ("block_indices", ov.Type.i32, [-1]),
    8: ("block_indices_begins", ov.Type.i32, [-1]),
    12: ("max_context_len", ov.Type.i32, []),
    26: ("qq_bias", ov.Type.u8, [-1]),
    27: ("qq_bias_begins", ov.Type.i32, [-1]),
}
"""Inputs of the operator that all layers share, by their number: name, type and shape.

- past_lens int32[S]: committed tokens of each sequence.
- subsequence_begins int32[S + 1]: the tokens of sequence s are `subsequence_begins[s]` to `subsequence_begins[s + 1]`.
- block_indices int32[P], block_indices_begins int32[S + 1]: the pages of each sequence, those of sequence s from
  `block_indices_begins[s]` on.
- max_context_len int32: the longest sequence, the tokens of the step included.
- qq_bias uint8[N], qq_bias_begins int32[S + 1]: for each sequence either n x n bytes, 1 where token i attends to token
  j of the step, or none for a chain.
"""

_NO_INTS, _NO_FLOATS, _ZERO = np.zeros(0, np.int32), np.zeros(0, np.float32), np.array(0, np.int32)
_UNUSED: dict[int, Any] = {
    11: _NO_FLOATS,  # slopes of ALiBi
    13: _NO_INTS,  # window of the aggregated scores
    14: _NO_INTS,  # rotated blocks, deltas and table
    15: _NO_INTS,
    16: _NO_FLOATS,
    17: _NO_FLOATS,  # threshold, block size and stride of XAttention
    18: _ZERO,
    19: _ZERO,
    20: np.zeros([0] * 4, np.float32),  # sinks
    21: _ZERO,  # adaptive eviction
    22: _NO_INTS,
    23: _NO_INTS,
    24: _NO_INTS,
    25: _NO_INTS,  # token types
}


def paged_attention(context: Any) -> list[ov.Output]:
    """Converts a call of `OPERATOR`.

    Placeholders stand for caches and parameters, because a converter cannot add inputs to the model; `add_parameters`
    exchanges them.
    """
    query, key, value = (context.get_input(i) for i in range(3))
    scale, heads, key_dim, kv_heads, value_dim, window = (context.get_values_from_const_input(i) for i in range(3, 9))
    inputs = dict(_UNUSED)
    inputs[_KEY_CACHE] = inputs[_VALUE_CACHE] = np.zeros([1] * 4, np.float32)
    inputs[_SCALE] = np.array(scale, np.float32)
    inputs[_WINDOW] = np.array(window, np.int32)  # the last tokens that a row attends to; 0 for all
    for number, (_, dtype, shape) in PARAMETERS.items():
        inputs[number] = np.zeros([1] * len(shape), dtype.to_dtype())
    flat = [_flat(query, heads * key_dim), _flat(key, kv_heads * key_dim), _flat(value, kv_heads * value_dim)]
    constants = [ops.constant(inputs[number]).output(0) for number in sorted(inputs)]
    attention = _PagedAttentionExtension([*flat, *constants])
    _name_heads(attention, kv_heads, key_dim, value_dim)
    shape = ops.constant(np.array([-1, 1, heads, value_dim]))
    return ops.reshape(attention.output(0), shape, False).outputs()  # type: ignore[no-any-return]


def restore_heads(model: ov.Model, layout: PageLayout) -> None:
    """Tells each PagedAttention operator the shape of its heads, which a file of a model does not keep."""
    for attention, shape in zip(_attentions(model), layout.shapes, strict=True):
        _name_heads(attention, *shape)


def add_parameters(model: ov.Model) -> None:
    """Gives all PagedAttention operators of a model, at least one, their inputs.

    The caches of the i-th are `key_cache.i` and `value_cache.i`: [page, kv_head, position, size], of the type that the
    property KV_CACHE_PRECISION names.
    """
    attentions = _attentions(model)
    shared = {number: _parameter(*of_number) for number, of_number in PARAMETERS.items()}
    added = list(shared.values())
    for layer, attention in enumerate(attentions):
        caches = {
            number: _parameter(f"{name}.{layer}", ov.Type.dynamic, [-1] * 4)
            for number, name in ((_KEY_CACHE, "key_cache"), (_VALUE_CACHE, "value_cache"))
        }
        for number, parameter in (shared | caches).items():
            attention.input(number).replace_source_output(parameter.output(0))
        added += caches.values()
    model.add_parameters(added)
    model.validate_nodes_and_infer_types()


def _attentions(model: ov.Model) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]


def _name_heads(attention: Any, kv_heads: int, key_dim: int, value_dim: int) -> None:
    info = attention.get_rt_info()
    info["num_k_heads"], info["k_head_size"] = kv_heads, key_dim
    info["num_v_heads"], info["v_head_size"] = kv_heads, value_dim


def _flat(tensor: Any, width: int) -> ov.Output:
    """[T, head, 1, size] as [T, head * size]: in memory they are the same, so that nothing is transposed."""
    return ops.reshape(tensor, ops.constant(np.array([-1, width])), False).output(0)


def _parameter(name: str, dtype: ov.Type, shape: list[int]) -> Any:
    parameter = ops.parameter(ov.PartialShape(shape), dtype, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter
