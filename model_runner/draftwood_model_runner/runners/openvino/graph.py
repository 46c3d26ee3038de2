"""What is changed in a converted model before it is compiled: OpenVINO's PagedAttention, and fewer, larger products."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension

from draftwood_model_runner.runners.openvino.pages import ATTENTION_ROWS, TOKEN_ROWS, PageLayout

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


class ConvertedModel(NamedTuple):
    """A model with paged tree attention.

    Attributes:
        model: its inputs are input_ids int64[T, 1], position_ids int64[T, 1], logit_rows int64[R] and those of
            `PARAMETERS`, its output is logits float32[R, vocab].
        layout: the shape of its pages.
        window: tokens that some layer attends to, if those are fewer than the positions that the model is run on.
        in_every_layer: each layer has this window.
        feature_layers: see `loading.loaded.adopt`; if there are any, a second output has the features,
            float32[T, f].
    """

    model: ov.Model
    layout: PageLayout
    window: int | None
    in_every_layer: bool
    feature_layers: tuple[int, ...] = ()


def convert_attention(context: Any) -> list[ov.Output]:
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


def join_products(model: ov.Model) -> int:
    """Joins the products of a converted model that have the same input; returns how many products became fewer.

    Each group of them becomes one product, with one bias where all have one, and a split of its output. Groups of
    which only some have a bias stay as they are. The joined weights are copies.
    """
    groups: dict[tuple[str, int], list[_Product]] = defaultdict(list)
    for node in model.get_ordered_ops():
        if (product := _product(node)) is not None:
            source = node.input_value(0)
            groups[source.get_node().get_name(), source.get_index()].append(product)
    joined = 0
    while groups:
        _, group = groups.popitem()  # so that the weights of one group are freed before the next one is copied
        if len(group) > 1 and len({product.bias is None for product in group}) == 1:
            _join(group)
            joined += len(group) - 1
    if joined:
        model.validate_nodes_and_infer_types()
    return joined


class _Product:
    """A product of a linear layer.

    Attributes:
        input: [..., k].
        weight: the constant [n, k].
        bias: the constant [n], if there is one.
        output: [..., n], bias included.
    """

    def __init__(self, node: Any) -> None:
        self.input: ov.Output = node.input_value(0)
        self.weight = node.input_value(1).get_node()
        self.bias: Any = None
        self.output: ov.Output = node.output(0)
        targets = list(self.output.get_target_inputs())
        if len(targets) == 1 and (add := targets[0].get_node()).get_type_name() == "Add":
            other = add.input_value(1 - targets[0].get_index()).get_node()
            if other.get_type_name() == "Constant" and list(other.shape) == [self.weight.shape[0]]:
                self.bias, self.output = other, add.output(0)


def _product(node: Any) -> _Product | None:
    if node.get_type_name() != "MatMul":
        return None
    flags, weight = node.get_attributes(), node.input_value(1).get_node()
    if flags["transpose_a"] or not flags["transpose_b"]:
        return None
    if weight.get_type_name() != "Constant" or len(weight.shape) != 2 or weight.get_element_type() != ov.Type.f32:
        return None
    return _Product(node)


def _join(group: list[_Product]) -> None:
    output = ops.matmul(group[0].input, _concatenated([product.weight for product in group]), False, True)
    if group[0].bias is not None:
        output = ops.add(output, _concatenated([product.bias for product in group]))
    sizes = np.array([product.weight.shape[0] for product in group])
    parts = ops.variadic_split(output, ops.constant(np.array(-1)), ops.constant(sizes))
    for i, product in enumerate(group):
        product.output.replace(parts.output(i))


def _concatenated(constants: list[Any]) -> Any:
    return ops.constant(np.concatenate([constant.data for constant in constants]))


def pair_single_tokens(model: ov.Model) -> None:
    """Makes attention compute a single token of a sequence twice, as a chain of two, so that bits depend less on
    batches.

    PagedAttention has one kernel for sequences with one token in the step and another for two and more. They round
    differently. So drafting off, which takes single tokens, would often meet other ties than drafts: in bfloat16, and
    with 8-bit weights, where a small difference can become a step of the 8-bit activations. All else in a step has the
    same bits at any width. The second token of a pair has its keys and values in the next slot, which nothing reads.

    The model gets two inputs, see `pages.paired`: attention_rows int32[A], the tokens of the step that attention
    computes, and token_rows int32[T], the place of each token among them.
    """
    parameters = [_parameter(name, ov.Type.i32, [-1]) for name in (ATTENTION_ROWS, TOKEN_ROWS)]
    attention_rows, token_rows = parameters
    zero = ops.constant(np.array(0, np.int32))
    for attention in _attentions(model):
        for port in range(3):
            attention.set_argument(port, ops.gather(attention.input_value(port), attention_rows, zero).output(0))
        consumers = attention.output(0).get_target_inputs()
        kept = ops.gather(attention.output(0), token_rows, zero)
        for consumer in consumers:
            consumer.replace_source_output(kept.output(0))
    model.add_parameters(parameters)
    model.validate_nodes_and_infer_types()
