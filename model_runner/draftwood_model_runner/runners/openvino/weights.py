"""Weights of a converted model as they are stored: 8 or 4 bits, or bfloat16, which products and look-ups read as they
are.

With 8 bits a matrix becomes unsigned integers with one scale and one zero point for each output channel, which NNCF
calls INT8_ASYM and OpenVINO's exporter takes for int8. With 4 bits the matrices of linear layers have a scale and a
zero point for each group of inputs (INT4_ASYM); the embedding and the head keep 8 bits, as NNCF leaves them. NNCF
itself would bring scipy and scikit-learn for these lines. bfloat16 weights would take twice the memory as float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from draftwood_model_runner.errors import UnsupportedRunnerError

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

BITS = {"int8": 8, "int4": 4}
"""How many bits a weight has, by the name of the weights."""
GROUP = 128
"""Inputs that share a scale and a zero point with 4 bits; a matrix whose inputs are no multiple of it gets 8 bits.
Activations are rounded in the same groups (`factory`): with others, the bits of a product depend on the tokens
of the step."""
_LEAST_SHARE = 0.5
"""Share of the weights below which a model would hardly get smaller or faster. Any value between the share of attention
in a mixture of experts and 1 refuses the same models."""

_LOWER_BITS = np.uint32(0xFFFF)
"""The bits of a float32 that are zero where bfloat16 holds the same number."""
_MARKS = ("keep_const_precision_0", "decompression_0", "disabled_constant_folding_0")
"""What OpenVINO's own MarkCompressedFloatConstants writes, so that a product or look-up reads such weights as they are.
A version that does not know them computes the same from float32 copies."""


class _Matrix(NamedTuple):
    """A constant that linear layers multiply by or embeddings look up.

    Attributes:
        constant: its node.
        axis: that of its inputs.
        product: the last product that it is multiplied in; None for one that is only looked up.
    """

    constant: Any
    axis: int
    product: Any | None


def quantize_weights(model: ov.Model, bits: int) -> None:
    """Quantizes the matrices of linear layers and of the embedding in place; vectors stay as they are.

    Args:
        bits: 8 or 4.

    Raises:
        UnsupportedRunnerError: most weights are in something else, such as the experts of a mixture.
    """
    matrices = _matrices(model)
    quantized = sum(_elements(matrix.constant) for matrix in matrices)
    total = sum(_elements(node) for node in model.get_ops() if _is_float_constant(node))
    if quantized < _LEAST_SHARE * total:
        raise UnsupportedRunnerError(
            f"OpenVINO: only {quantized / total:.0%} of the weights are in linear layers and the embedding; others,"
            " such as those of experts, cannot be quantized"
        )
    head = next((matrix.constant for matrix in reversed(matrices) if matrix.product is not None), None)
    for matrix in matrices:
        if bits == 8 or matrix.constant is head or not _has_groups(matrix):
            _quantize_by_channels(matrix)
        else:
            _quantize_by_groups(matrix)
    model.validate_nodes_and_infer_types()


def quantize(matrix: Float32Array, axis: int, bits: int = 8) -> tuple[UInt8Array, Float32Array, UInt8Array]:
    """Levels of the matrix's shape, scales and zero points of that shape with 1 for `axis`, over which they are shared:
    `matrix` is about `(levels - zero_points) * scales`, to half a scale, and zeros are exact. Levels are below
    2 ** `bits`."""
    highest = 2**bits - 1
    low = np.minimum(matrix.min(axis, keepdims=True), 0.0)
    high = np.maximum(matrix.max(axis, keepdims=True), 0.0)
    scales = ((high - low) / highest).astype(np.float32)
    scales[scales == 0.0] = 1.0
    zero_points = np.rint(-low / scales)
    levels = np.clip(np.rint(matrix / scales) + zero_points, 0, highest)
    return levels.astype(np.uint8), scales, zero_points.astype(np.uint8)


def _quantize_by_channels(matrix: _Matrix) -> None:
    """8 bits, with a scale for each output channel."""
    constant = matrix.constant
    consumers = constant.output(0).get_target_inputs()
    levels, scales, zero_points = quantize(constant.get_data(dtype=np.float32), matrix.axis)
    product = _dequantized(ops.constant(levels), ops.constant(zero_points), scales)
    product.set_friendly_name(f"{constant.get_friendly_name()}/dequantized")
    for consumer in consumers:
        consumer.replace_source_output(product.output(0))


def _quantize_by_groups(matrix: _Matrix) -> None:
    """4 bits, with a scale for each group of inputs of an output channel. The matrix gets inputs as its last axis."""
    constant, product = matrix.constant, matrix.product
    weights = constant.get_data(dtype=np.float32)
    weights = np.ascontiguousarray(weights.T if matrix.axis == 0 else weights)
    levels, scales, zero_points = quantize(weights.reshape(weights.shape[0], -1, GROUP), 2, 4)
    grouped = _dequantized(_four_bits(levels), _four_bits(zero_points), scales)
    joined = ops.reshape(grouped, ops.constant(np.array(weights.shape)), False)
    joined.set_friendly_name(f"{constant.get_friendly_name()}/dequantized")
    assert product is not None
    transposed = product.get_attributes()["transpose_a"]
    product.output(0).replace(ops.matmul(product.input_value(0), joined, transposed, True).output(0))


def _has_groups(matrix: _Matrix) -> bool:
    """Whether one product alone has the matrix, with inputs in whole groups."""
    output = matrix.constant.output(0)
    alone = matrix.product is not None and len(output.get_target_inputs()) == 1
    return alone and output.shape[matrix.axis] % GROUP == 0


def _matrices(model: ov.Model) -> list[_Matrix]:
    """The matrices in the order of their last use."""
    matrices: dict[str, _Matrix] = {}
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "MatMul":
            constant, axis = _constant(node, 1), 1 if node.get_attributes()["transpose_b"] else 0
        elif kind == "Gather":
            constant, axis = _constant(node, 0), 1
        else:
            continue
        if constant is not None and len(constant.output(0).shape) == 2:
            before = matrices.pop(constant.get_friendly_name(), None)
            product = node if kind == "MatMul" else before and before.product
            matrices[constant.get_friendly_name()] = _Matrix(constant, axis, product)
    return [*matrices.values()]


def _constant(node: Any, port: int) -> Any | None:
    """The constant of floats at an input of a node, if there is one."""
    source = node.input_value(port).get_node()
    if source.get_type_name() == "Convert":
        source = source.input_value(0).get_node()
    return source if _is_float_constant(source) else None


def _is_float_constant(node: Any) -> bool:
    return bool(node.get_type_name() == "Constant" and node.output(0).get_element_type().is_real())


def _elements(constant: Any) -> int:
    return int(np.prod(list(constant.output(0).shape), dtype=np.int64))


def _dequantized(levels: Any, zero_points: Any, scales: Float32Array) -> Any:
    centred = ops.subtract(ops.convert(levels, "f32"), ops.convert(zero_points, "f32"))
    return ops.multiply(centred, ops.constant(scales))


def _four_bits(integers: UInt8Array) -> Any:
    """A constant of integers below 16, two in each byte, the first one in its lower half."""
    flat = integers.ravel()
    even = flat if flat.size % 2 == 0 else np.append(flat, np.uint8(0))
    packed = even[0::2] | even[1::2] << np.uint8(4)
    return ov.op.Constant(ov.Tensor(packed, ov.Shape(integers.shape), ov.Type.u4), shared_memory=False)


def keep_bfloat16(model: ov.Model) -> int:
    """Makes the float32 matrices that hold bfloat16 numbers constants in bfloat16, in place; returns how many."""
    nodes = [node for node in model.get_ordered_ops() if _is_matrix(node)]
    kept = 0
    while nodes:
        node = nodes.pop()  # so that each is freed before the next one is copied
        bits = np.ascontiguousarray(node.data).view(np.uint32)
        if not (bits & _LOWER_BITS).any():
            halves = (bits >> 16).astype(np.uint16)
            node.output(0).replace(_as_float32(ov.Tensor(halves, ov.Shape(halves.shape), ov.Type.bf16)))
            kept += 1
    if kept:
        model.validate_nodes_and_infer_types()
    return kept


def restore_marks(model: ov.Model) -> None:
    """Marks the constants in bfloat16 again, whose marks a file of a model does not keep."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.bf16:
            for marked in (node, *(consumer.get_node() for consumer in node.output(0).get_target_inputs())):
                _mark(marked)


def _is_matrix(node: Any) -> bool:
    return bool(node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.f32 and len(node.shape) >= 2)


def _as_float32(tensor: ov.Tensor) -> ov.Output:
    constant = ov.op.Constant(tensor, shared_memory=False)
    converted = ops.convert(constant, "f32")
    for node in (constant, converted):
        _mark(node)
    return converted.output(0)


def _mark(node: Any) -> None:
    for mark in _MARKS:
        node.get_rt_info()[mark] = True
