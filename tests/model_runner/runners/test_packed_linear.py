"""Linear layers of a CPU model: packed, in few widths, and still the same function, row by row the same bits."""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest
import torch
from torch import nn

from draftwood_model_runner.runners.torch import packed_linear
from draftwood_model_runner.runners.torch.packed_linear import (
    PackedLinear,
    RowBounds,
    _tried_bounds,
    bound_kernel_caches,
    kernel_width,
    noted_calls,
    pack_linears,
)
from draftwood_model_runner.runners.torch.probe import probe
from tests.model_runner.families import tiny

_NO_BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products"
)
_DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=_NO_BFLOAT16)]


def _linear(dtype: torch.dtype, bias: bool = True, ins: int = 200, outs: int = 77) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(ins, outs, bias).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_the_product_is_rounded_once(dtype: torch.dtype, bias: bool) -> None:
    linear = _linear(dtype, bias)
    inputs = torch.randn(3, 50, 200).to(dtype)
    exact = nn.functional.linear(inputs.double(), linear.weight.double(), linear.bias.double() if bias else None)
    outputs = PackedLinear(linear)(inputs)
    assert outputs.shape == exact.shape
    assert outputs.dtype == dtype
    rounding = torch.finfo(dtype).eps * (10 if dtype == torch.float32 else 1)
    assert (outputs.double() - exact).abs().max() <= rounding * exact.abs().max()
    assert dtype == torch.float32 or (outputs == exact.to(dtype)).float().mean() > 0.99


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("ins", "outs"), [(256, 704), (768, 768), (48, 96)])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_rows_bits_do_not_depend_on_the_others(dtype: torch.dtype, ins: int, outs: int, threads: int) -> None:
    rows = torch.randn(300, ins).to(dtype)
    torch.set_num_threads(threads)
    layer = PackedLinear(_linear(dtype, ins=ins, outs=outs))
    expected = layer(rows)
    for count in [*range(1, 40), 61, 62, 119, 120, 121, 122, 127, 199, 257]:
        assert torch.equal(layer(rows[:count]), expected[:count]), count
        assert torch.equal(layer(rows[None, -count:])[0], expected[-count:]), count


@torch.inference_mode()
@pytest.mark.parametrize(
    ("other_order", "bounds"),
    [
        ((), RowBounds(False, 256)),
        ((1,), RowBounds(True, 256)),
        (range(33, 257), RowBounds(False, 32)),
        ((1, *range(129, 200)), RowBounds(True, 128)),
        (range(1, 12), RowBounds(False, 1)),
    ],
    ids=["none", "alone", "beyond 32", "alone, and beyond 128", "few"],
)
def test_products_that_sum_in_another_order_are_found(
    monkeypatch: pytest.MonkeyPatch, other_order: Collection[int], bounds: RowBounds
) -> None:
    def product(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        terms = torch.arange(64) if rows.shape[0] not in other_order else torch.arange(63, -1, -1)
        weight, total = packed.to_dense(), torch.zeros(rows.shape[0], 40)
        for term in terms:  # one by one: the order is this one, whatever the machine
            total += rows[:, term, None].float() * weight[:, term]
        return total

    monkeypatch.setattr(packed_linear, "_product", product)
    assert _tried_bounds(64, 40, torch.float32) == bounds


def test_bounds_are_those_of_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_tried_bounds", lambda *_: RowBounds(torch.get_num_threads() == 2, 256))
    monkeypatch.setattr(packed_linear, "_bounds", {})
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        assert PackedLinear(_linear(torch.float32))._rows.pairs_single == (threads == 2)


def test_a_layer_that_may_compute_something_else_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    hooked, replaced = nn.Linear(4, 4), nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    replaced.forward = torch.abs  # type: ignore[method-assign]
    module = nn.ModuleDict({"plain": nn.Linear(4, 4), "derived": Doubled(4, 4), "hooked": hooked, "replaced": replaced})
    assert pack_linears(module) == 1
    assert type(module["derived"]) is Doubled
    assert (module["hooked"], module["replaced"]) == (hooked, replaced)


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.out = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.out(inputs)
        return hidden @ self.classifier.weight.T


@torch.inference_mode()
def test_a_layer_whose_weight_is_read_is_not_packed() -> None:
    router, inputs = _Router().eval(), torch.randn(3, 8)
    with noted_calls(router) as called:
        expected = router(inputs)
    pack_linears(router, called)
    assert isinstance(router.out, PackedLinear)
    assert not isinstance(router.classifier, PackedLinear)
    torch.testing.assert_close(router(inputs), expected)


def test_a_cpu_without_products_in_the_models_dtype_is_told_and_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_linear, "_multiplies_in", lambda dtype: False)
    module = tiny("llama").to(torch.bfloat16)
    probe(module, exact=True, max_context=256)
    assert "torch.bfloat16" in caplog.text
    assert all(type(child) is nn.Linear for name, child in module.named_modules() if name.endswith("_proj"))


def test_products_have_few_widths_and_little_is_added() -> None:
    widths = [kernel_width(rows) for rows in range(1, 5000)]
    assert all(width >= rows for rows, width in enumerate(widths, 1))
    assert all(width == rows for rows, width in enumerate(widths[:32], 1))
    assert all(width <= rows + rows // 8 for rows, width in enumerate(widths, 1))
    assert widths == sorted(widths)
    assert [kernel_width(width) for width in widths] == widths
    assert len({width for width in widths if width <= 512}) == 72


def test_kernels_are_bounded_unless_the_user_bounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"LRU_CACHE_CAPACITY": "7"})
    bound_kernel_caches(shapes=4)
    assert os.environ == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "320"}
