"""Products of one input are joined, and bfloat16 weights stay bfloat16; what the model computes stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
import torch
from openvino import opset13 as ops

from draftwood_model_runner.runners.openvino.conversion import convert
from draftwood_model_runner.runners.openvino.factory import core
from draftwood_model_runner.runners.openvino.graph.bfloat16 import keep_bfloat16
from draftwood_model_runner.runners.openvino.graph.joining import join_products
from tests.model_runner.families import tiny

_INPUTS = 8


def linear_layers(biases: Sequence[bool], integral: bool = False) -> ov.Model:
    """Linear layers of 3, 4, ... outputs over one input float32[T, 8]; `integral`: bfloat16 holds their weights."""
    random = np.random.default_rng(0)

    def weight(*shape: int) -> npt.NDArray[np.float32]:
        return (random.integers(-8, 8, shape) if integral else random.normal(size=shape)).astype(np.float32)

    source = ops.parameter(ov.PartialShape([-1, _INPUTS]), ov.Type.f32)
    outputs = []
    for i, biased in enumerate(biases):
        product = ops.matmul(source, ops.constant(weight(3 + i, _INPUTS)), False, True)
        outputs.append(ops.add(product, ops.constant(weight(3 + i))) if biased else product)
    return ov.Model(outputs, [source])


def computed(model: ov.Model) -> list[npt.NDArray[Any]]:
    compiled = core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"})
    source = np.random.default_rng(1).normal(size=(5, _INPUTS)).astype(np.float32)
    return [np.array(output) for output in compiled([source]).values()]


def kinds(model: ov.Model) -> list[str]:
    return [node.get_type_name() for node in model.get_ops()]


@pytest.mark.parametrize(("biases", "fewer"), [([False] * 3, 2), ([True] * 3, 2), ([True, False], 0), ([False], 0)])
def test_products_of_one_input_become_one(biases: list[bool], fewer: int) -> None:
    model = linear_layers(biases)
    expected = computed(model)
    assert join_products(model) == fewer
    assert kinds(model).count("MatMul") == len(biases) - fewer
    for found, right in zip(computed(model), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_layer_has_four_products(family: str) -> None:
    """With biases (Qwen2) and without; nothing is transposed on the way to attention."""
    module = tiny(family)
    model = convert(module, max_context=128).model
    products = [node for node in model.get_ops() if node.get_type_name() == "MatMul"]
    weights = [node for node in products if node.input_value(1).get_node().get_type_name() == "Constant"]
    assert len(weights) == 4 * module.config.num_hidden_layers + 1
    for node in model.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            flat = [node.input_value(i).get_node() for i in range(3)]
            assert [one.get_type_name() for one in flat] == ["Reshape"] * 3
            assert all(one.input_value(0).get_node().get_type_name() != "Transpose" for one in flat[:2])


def test_matrices_of_bfloat16_numbers_stay_bfloat16() -> None:
    model = linear_layers([True, False], integral=True)
    expected = computed(model)
    assert keep_bfloat16(model) == 2
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    assert {node.get_element_type() for node in constants if len(node.shape) == 2} == {ov.Type.bf16}
    for found, right in zip(computed(model), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    assert keep_bfloat16(linear_layers([True])) == 0


def test_the_weights_of_a_bfloat16_model_are_all_found() -> None:
    model = convert(tiny("llama").to(torch.bfloat16), max_context=128).model
    keep_bfloat16(model)
    for node in model.get_ops():
        if node.get_type_name() in ("MatMul", "Gather") and len(node.inputs()) > 1:
            port = 1 if node.get_type_name() == "MatMul" else 0
            weight = node.input_value(port).get_node()
            assert weight.get_type_name() != "Constant" or weight.get_element_type() != ov.Type.f32
