"""Keeps bfloat16 weights of a converted model in bfloat16: as float32 they take twice the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

_LOWER_BITS = np.uint32(0xFFFF)
"""Of a float32: all zero where bfloat16 holds the same number."""
_MARKS = ("keep_const_precision_0", "decompression_0", "disabled_constant_folding_0")
"""What OpenVINO's own MarkCompressedFloatConstants writes, so that a product or look-up reads such weights as they are.
A version that does not know them computes the same from float32 copies."""


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
