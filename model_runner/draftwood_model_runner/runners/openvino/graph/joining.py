"""Joins products of the same input: queries, keys and values, or gate and up, become one product each.

OpenVINO shares out every product to its threads, and waits for all of them at the end. On the bundled model half of a
step of one token goes to that.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops


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
    output = ops.matmul(group[0].input, _concatenated([one.weight for one in group]), False, True)
    if group[0].bias is not None:
        output = ops.add(output, _concatenated([one.bias for one in group]))
    sizes = np.array([one.weight.shape[0] for one in group])
    parts = ops.variadic_split(output, ops.constant(np.array(-1)), ops.constant(sizes))
    for i, one in enumerate(group):
        one.output.replace(parts.output(i))


def _concatenated(constants: list[Any]) -> Any:
    return ops.constant(np.concatenate([constant.data for constant in constants]))
