"""Cuts a converted model at its output head, a product with a matrix that has a row for each token."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

_LEAST_ELEMENTS = 1 << 24
"""Of a matrix that is cut off: smaller ones are read in a millisecond."""

_KINDS = {"float32": (ov.Type.f32, np.int32), "bfloat16": (ov.Type.bf16, np.uint16)}


class CutModel(NamedTuple):
    """A model in two parts, which share its constants.

    Attributes:
        body: the inputs of the model; its output is what the head multiplies, float32[R, 1, d].
        head: from float32[R, d] to logits float32[R, vocab].
        weights: the matrix [vocab, d], the bits of bfloat16 as uint16 or of float32 as int32; memory of the model.
    """

    body: ov.Model
    head: ov.Model
    weights: npt.NDArray[Any]


def cut_at_head(model: ov.Model, dtype: str) -> CutModel | None:
    """None if the head is small, if more than a product leads to the logits, or if its matrix is of another type than
    `dtype`, "float32" or "bfloat16". The model is left as it was."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() == "Reshape":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "MatMul":
        return None
    attributes, matrix = node.get_attributes(), node.input_value(1)
    source = matrix.get_node()
    constant = source.input_value(0).get_node() if source.get_type_name() == "Convert" else source
    transposed = attributes["transpose_b"] and not attributes["transpose_a"]
    if not transposed or constant.get_type_name() != "Constant" or np.prod(list(constant.shape)) < _LEAST_ELEMENTS:
        return None
    kind, bits = _KINDS[dtype]
    if constant.get_element_type() != kind:
        return None
    weights = constant.data.view(bits)
    hidden = ops.parameter([-1, weights.shape[1]], np.float32)
    head = ov.Model([ops.matmul(hidden, matrix, False, True)], [hidden])
    return CutModel(ov.Model([node.input_value(0)], model.get_parameters()), head, weights)
