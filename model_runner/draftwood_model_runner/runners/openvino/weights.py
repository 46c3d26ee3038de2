"""8-bit weights of a converted model, which OpenVINO's products and look-ups read as they are.

A matrix becomes unsigned integers with one scale and one zero point for each output channel, which NNCF calls
INT8_ASYM and OpenVINO's exporter takes for int8. NNCF itself would bring scipy and scikit-learn for these lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from draftwood_model_runner.errors import UnsupportedRunnerError

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

_LEVELS = 255
_LEAST_SHARE = 0.5
"""Share of the weights below which a model would hardly get smaller or faster. Any value between the share of attention
in a mixture of experts and 1 refuses the same models."""


def quantize_weights(model: ov.Model) -> None:
    """Quantizes the matrices of linear layers and of the embedding in place; vectors stay as they are.

    Raises:
        UnsupportedRunnerError: most weights are in something else, such as the experts of a mixture.
    """
    matrices = {matrix.get_friendly_name(): (matrix, axis) for matrix, axis in _matrices(model)}
    quantized = sum(_elements(matrix) for matrix, _ in matrices.values())
    total = sum(_elements(node) for node in model.get_ops() if _is_float_constant(node))
    if quantized < _LEAST_SHARE * total:
        raise UnsupportedRunnerError(
            f"OpenVINO: only {quantized / total:.0%} of the weights are in linear layers and the embedding; others,"
            " such as those of experts, cannot be quantized"
        )
    for matrix, axis in matrices.values():
        consumers = matrix.output(0).get_target_inputs()
        levels, scales, zero_points = quantize(matrix.get_data(dtype=np.float32), axis)
        centred = ops.subtract(_as_float(levels), _as_float(zero_points))
        product = ops.multiply(centred, ops.constant(scales))
        product.set_friendly_name(f"{matrix.get_friendly_name()}/dequantized")
        for consumer in consumers:
            consumer.replace_source_output(product.output(0))
    model.validate_nodes_and_infer_types()


def quantize(matrix: Float32Array, axis: int) -> tuple[UInt8Array, Float32Array, UInt8Array]:
    """Levels of the matrix's shape, scales and zero points of that shape with 1 for `axis`, over which they are shared:
    `matrix` is about `(levels - zero_points) * scales`, to half a scale, and zeros are exact."""
    low = np.minimum(matrix.min(axis, keepdims=True), 0.0)
    high = np.maximum(matrix.max(axis, keepdims=True), 0.0)
    scales = ((high - low) / _LEVELS).astype(np.float32)
    scales[scales == 0.0] = 1.0
    zero_points = np.rint(-low / scales)
    levels = np.clip(np.rint(matrix / scales) + zero_points, 0, _LEVELS)
    return levels.astype(np.uint8), scales, zero_points.astype(np.uint8)


def _matrices(model: ov.Model) -> Iterator[tuple[Any, int]]:
    """The constants that linear layers multiply by and embeddings look up, each with the axis of its inputs."""
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "MatMul":
            matrix, axis = _constant(node, 1), 1 if node.get_attributes()["transpose_b"] else 0
        elif kind == "Gather":
            matrix, axis = _constant(node, 0), 1
        else:
            continue
        if matrix is not None and len(matrix.output(0).shape) == 2:
            yield matrix, axis


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


def _as_float(integers: UInt8Array) -> Any:
    return ops.convert(ops.constant(integers), "f32")
