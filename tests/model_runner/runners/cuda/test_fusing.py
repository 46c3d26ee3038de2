"""Kernels that replace small operations of a model compute the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from model_runner.runners.cuda.fusing import fuse
from tests.model_runner.families import tiny


def inner(family: str, dtype: torch.dtype = torch.float32) -> Any:
    module = tiny(family, num_hidden_layers=1).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
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
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    with torch.inference_mode():
        for (name, one), other in zip(plain.named_modules(), fused.modules(), strict=True):
            if "forward" in vars(other):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotation_within_a_step_only(dtype: torch.dtype) -> None:
    from transformers.models.llama import modeling_llama

    from model_runner.runners.cuda.device.launching import LAUNCHER, Launch
    from model_runner.runners.cuda.steps.attention import STEP

    fuse(inner("llama"))
    query, key = torch.randn(2, 1, 5, 4, 16).to(dtype)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    cos, sin = torch.randn(2, 1, 4, 16).to(dtype)
    launched: list[str] = []

    def noted(one: Launch) -> None:
        launched.append(one.kernel.__name__)
        one.run()

    LAUNCHER.set(noted)
    expected = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
    assert launched == []
    token = STEP.set(None)  # type: ignore[arg-type]
    try:
        assert modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)[0].equal(expected[0])
        STEP.set("a step")  # type: ignore[arg-type]
        rotated = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
    finally:
        STEP.reset(token)
        LAUNCHER.set(Launch.run)
    assert set(launched) == {"rotate"}
    for one, right in zip(rotated, expected, strict=True):
        assert (one - right).abs().max() <= (1e-6 if dtype == torch.float32 else 0)
