"""Linear layers of a CPU model: fused, packed, and still the same function, row by row the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from model_runner.runners.torch import attention
from model_runner.runners.torch.linear import fbgemm_linear, packing
from model_runner.runners.torch.linear.fbgemm_linear import FbgemmLinear
from model_runner.runners.torch.linear.fused_linear import FusedLinear, LinearPart, joined, of_one_input, watch
from model_runner.runners.torch.linear.onednn_linear import OneDnnLinear
from model_runner.runners.torch.linear.packing import pack_linears
from model_runner.runners.torch.probe import probe
from tests.model_runner.families import tiny

_NEEDS_FBGEMM = pytest.mark.skipif(fbgemm_linear.row_multiple() is None, reason="no FBGEMM that sums rows alike")
_LAYERS = [
    (OneDnnLinear, torch.float32),
    pytest.param(FbgemmLinear, torch.bfloat16, marks=_NEEDS_FBGEMM),
    pytest.param(FbgemmLinear, torch.float16, marks=_NEEDS_FBGEMM),
]


def _linear(dtype: torch.dtype, bias: bool = True, ins: int = 200, outs: int = 77) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(ins, outs, bias).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("packed", "dtype"), _LAYERS)
def test_the_product_is_rounded_once(packed: type[nn.Module], dtype: torch.dtype, bias: bool) -> None:
    linear = _linear(dtype, bias)
    inputs = torch.randn(3, 50, 200).to(dtype)
    exact = nn.functional.linear(inputs.double(), linear.weight.double(), linear.bias.double() if bias else None)
    outputs = packed(linear)(inputs)
    assert outputs.shape == exact.shape
    assert outputs.dtype == dtype
    rounding = torch.finfo(dtype).eps * (10 if dtype == torch.float32 else 1)
    assert (outputs.double() - exact).abs().max() <= rounding * exact.abs().max()
    assert dtype == torch.float32 or (outputs == exact.to(dtype)).float().mean() > 0.99


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("packed", "dtype"), _LAYERS)
def test_a_rows_bits_do_not_depend_on_the_others(packed: type[nn.Module], dtype: torch.dtype, threads: int) -> None:
    layer = packed(_linear(dtype, ins=256, outs=704))
    rows = torch.randn(200, 256).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = layer(rows)
        for count in [*range(1, 40), 61, 62, 119, 120, 121, 122, 127, 199]:
            assert torch.equal(layer(rows[:count]), expected[:count]), count
            assert torch.equal(layer(rows[None, -count:])[0], expected[-count:]), count
    finally:
        torch.set_num_threads(before)


@_NEEDS_FBGEMM
@torch.inference_mode()
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-10, 2.0**60])
def test_weights_far_outside_float16_are_exact(scale: float) -> None:
    linear = _linear(torch.bfloat16, bias=False)
    linear.weight.data *= scale
    linear.weight.data[0] = 2.0**-20 * linear.weight.data[1]
    unit = torch.eye(200, dtype=torch.bfloat16)
    assert torch.equal(FbgemmLinear(linear)(unit), linear.weight.T)


@_NEEDS_FBGEMM
@torch.inference_mode()
def test_a_few_small_weights_are_rounded_as_float32_would() -> None:
    linear = _linear(torch.bfloat16, bias=False)
    linear.weight.data[0, :3] *= 2.0**-24
    packed = FbgemmLinear(linear)
    assert packed._unscale is None
    off = packed(torch.eye(200, dtype=torch.bfloat16)).T.float() - linear.weight.float()
    assert 0 < off.norm() < 2.0**-24 * linear.weight.float().norm()


@_NEEDS_FBGEMM
@torch.inference_mode()
def test_a_layer_of_zeros_is_zero() -> None:
    linear = _linear(torch.bfloat16, bias=False)
    linear.weight.data.zero_()
    assert not FbgemmLinear(linear)(torch.randn(5, 200).bfloat16()).any()


def test_a_models_layers_of_one_input_are_found() -> None:
    module = tiny("llama")
    with watch(module) as calls:
        module(input_ids=torch.zeros(1, 3, dtype=torch.long))
    names = [[name.removeprefix("model.layers.") for name in group] for group in of_one_input(calls)]
    attention, mlp = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]
    assert names == [
        [f"{layer}.{part}.{name}" for name in group]
        for layer in (0, 1, 2)
        for part, group in (("self_attn", attention), ("mlp", mlp))
    ]
    assert not any(child._forward_pre_hooks for child in module.modules())


def test_a_layer_that_is_called_twice_stays_alone() -> None:
    first, second, third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    module = nn.ModuleList([first, second, third])
    rows = torch.ones(1, 4)
    with watch(module) as calls:
        first(rows), second(rows), third(rows)
    assert of_one_input(calls) == [["0", "1"]]
    with watch(module) as calls:
        first(rows), second(rows), first(rows)
    assert of_one_input(calls) == []


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
def test_a_fused_layer_is_its_layers(bias: bool) -> None:
    layers = [_linear(torch.float32, bias, outs=outs) for outs in (5, 30, 12)]
    fused = FusedLinear(joined(layers), [layer.out_features for layer in layers])
    parts = [LinearPart(fused, index, layer) for index, layer in enumerate(layers)]
    one, other = torch.randn(2, 9, 200)
    for inputs, order in [(one, (0, 1, 2)), (other, (0, 1)), (one, (1, 2, 0)), (other, (2, 2, 0, 1, 2))]:
        for index in order:
            torch.testing.assert_close(parts[index](inputs), layers[index](inputs))


@torch.inference_mode()
def test_a_fused_layer_keeps_no_activations() -> None:
    layers = [_linear(torch.float32) for _ in range(2)]
    fused = FusedLinear(joined(layers), [77, 77])
    inputs = torch.randn(9, 200)
    fused.part(0, inputs)
    assert fused._latest is not None
    fused.part(1, inputs)
    assert fused._latest is None


def test_a_model_is_packed_whole() -> None:
    attention.register()
    module = tiny("qwen2")
    probe(module, exact=True)
    assert not any(type(child) is nn.Linear for child in module.modules())
    assert sum(isinstance(child, LinearPart) for child in module.modules()) == 3 * 5
    assert sum(isinstance(child, OneDnnLinear) for child in module.modules()) == 3 * 4 + 1


def test_a_layer_derived_from_linear_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    module = nn.ModuleDict({"plain": nn.Linear(4, 4), "derived": Doubled(4, 4)})
    assert pack_linears(module) == 1
    assert type(module["derived"]) is Doubled


def test_a_cpu_without_products_in_the_models_dtype_is_told_and_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packing, "_packer", lambda dtype: None)
    attention.register()
    module = tiny("llama").to(torch.bfloat16)
    probe(module, exact=True)
    assert "torch.bfloat16" in caplog.text
    assert all(type(child) is nn.Linear for name, child in module.named_modules() if name.endswith("_proj"))
