"""Kernels that replace small operations of a model compute the same."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from draftwood_benchmarks.gpu.prediction import LAYER_KERNELS, OTHER_KERNELS
from draftwood_model_runner.runners.attention_shapes import attention_shapes
from draftwood_model_runner.runners.cuda.fusing.model import fuse
from draftwood_model_runner.runners.cuda.fusing.norms import FusedNorm
from draftwood_model_runner.runners.cuda.runner import CudaLayout, CudaRunner
from draftwood_model_runner.runners.cuda.steps.attention import ATTENTION_NAME, register
from draftwood_model_runner.runners.cuda.steps.recording import Recording
from tests.model_runner.families import tiny
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.fake_step import fake_step, launched

VIEWS = {
    "_unsafe_view",
    "detach",
    "empty",
    "empty_like",
    "expand",
    "new_empty",
    "select",
    "slice",
    "split_with_sizes",
    "t",
    "transpose",
    "unsqueeze",
    "view",
}
"""Operations that launch nothing."""


def inner(family: str, dtype: torch.dtype = torch.float32) -> Any:
    module = tiny(family, num_hidden_layers=1).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "norms", "mlps"), [("llama", 3, 1), ("qwen3", 5, 1), ("gemma2", 5, 0), ("gpt-neox", 0, 0), ("phi", 0, 0)]
)
def test_the_same_but_for_rounding(family: str, norms: int, mlps: int, dtype: torch.dtype) -> None:
    """Gemma 2 adds 1 to the weights of its norms, and its MLP has another activation."""
    plain = inner(family, dtype)
    fused = copy.deepcopy(plain)
    counts = fuse(fused)
    assert counts["norms"] == norms
    assert counts["MLPs"] == mlps
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    with torch.inference_mode():
        for (name, one), other in zip(plain.named_modules(), fused.modules(), strict=True):
            if isinstance(vars(other).get("forward"), FusedNorm) or hasattr(one, "gate_proj"):
                width = one.weight.numel() if hasattr(one, "weight") else one.gate_proj.in_features
                x = torch.randn(2, 3, width, dtype=dtype)
                expected = one(x)
                assert (other(x) - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max())), name


def test_an_operation_that_looks_alike_stays() -> None:
    """An RMSNorm that does something else: it is tried before it is replaced."""

    class OddRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.pow(2).mean(-1, keepdim=True).sqrt()

    model = torch.nn.Sequential(OddRMSNorm())
    assert fuse(model)["norms"] == 0
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_within_a_step_only(dtype: torch.dtype) -> None:
    from transformers.models.llama import modeling_llama

    fuse(inner("llama"))
    wide = torch.randn(1, 4, 9, 16).to(dtype)
    query, key = wide[:, :, :5].transpose(1, 2), wide[:, :, 5:7].transpose(1, 2)
    cos, sin = torch.randn(2, 1, 4, 16).to(dtype)
    with launched() as kernels:
        expected = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
        assert kernels == []
        with fake_step():
            modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)  # tried
            kernels.clear()
            rotated = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
    assert kernels == ["rotate"]
    for one, right in zip(rotated, expected, strict=True):
        assert (one - right).abs().max() <= (1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", LAYER_KERNELS), ("qwen3", LAYER_KERNELS + 2), ("gemma2", 16)]
)
def test_kernels_of_a_layer(family: str, expected: int) -> None:
    """Qwen 3 norms heads of queries and keys; the layers of Gemma 2 have other residuals and another activation."""
    one, two = (kernels_of_a_step(family, layers) for layers in (1, 2))
    assert len(two) - len(one) == expected, (one, two)
    if family == "llama":
        assert len(one) - expected == OTHER_KERNELS - 7, one


@torch.no_grad()  # in inference mode torch hides what operations such as `linear` and `reshape` consist of
def kernels_of_a_step(family: str, layers: int) -> list[str]:
    """What a step of a model launches."""
    module = tiny(family, num_hidden_layers=layers).to(DEVICE)
    register()
    shapes, group, dtype = attention_shapes(module, 64)
    module.set_attn_implementation(ATTENTION_NAME)
    fuse(module)
    forward = CudaRunner(module, CudaLayout(shapes, group, dtype, DEVICE), 64, graphs=False)._forward
    step = forward.prepare_padding(1, forward.row_choices[0])
    forward.launch(step)  # the rotation is tried in the first step
    notes = Recording(forward, step)._noted
    names = [re.split(r"[(. ]", note.removeprefix("aten::"))[0] for note in notes]
    return [name for name in names if name not in VIEWS]
