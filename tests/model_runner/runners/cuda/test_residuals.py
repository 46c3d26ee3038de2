"""Residuals that are added within the next norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from draftwood_model_runner.runners.cuda.fusing.model import fuse
from tests.model_runner.families import tiny
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.fake_step import fake_step, launched

SIZE = 48


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(SIZE)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Linear):
    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0, **options: Any) -> Any:  # type: ignore[override]
        return super().forward(hidden_states) * scale, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()

    def forward(self, hidden_states: torch.Tensor, scale: float = 2.0, **options: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), scale=scale, **options)
        hidden_states = hidden_states + attended
        output: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class Scaled(Layer):
    """As Granite with a multiplier that is hardly another than 1."""

    def forward(self, hidden_states: torch.Tensor, scale: float = 2.0, **options: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), scale=scale, **options)
        hidden_states = hidden_states + attended * 0.99
        output: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class NormsAfterwards(Layer):
    """As OLMo 2."""

    def forward(self, hidden_states: torch.Tensor, scale: float = 2.0, **options: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=hidden_states, scale=scale, **options)
        hidden_states = hidden_states + self.input_layernorm(attended)
        output: torch.Tensor = hidden_states + self.post_attention_layernorm(self.mlp(hidden_states))
        return output


class Parallel(Layer):
    """As GPT-J."""

    def forward(self, hidden_states: torch.Tensor, scale: float = 2.0, **options: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), scale=scale, **options)
        output: torch.Tensor = hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class OtherOptions(Layer):
    def forward(self, hidden_states: torch.Tensor, scale: float = 2.0, **options: Any) -> torch.Tensor:
        return super().forward(hidden_states, 1.0, **options)


class Model(nn.Module):
    def __init__(self, kind: type[Layer], layers: int = 2) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(kind() for _ in range(layers)), RMSNorm()

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, **options)
        normed: torch.Tensor = self.norm(hidden_states)
        return normed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}])
@torch.inference_mode()
def test_in_a_step_sums_are_made_within_norms(dtype: torch.dtype, options: dict[str, float]) -> None:
    model = Model(Layer).to(DEVICE, dtype)
    x = torch.randn(1, 5, SIZE, dtype=dtype, device=DEVICE)
    expected = model(x, **options)
    assert fuse(model)["residuals"] == 2
    with fake_step() as pending, launched() as kernels:
        output = model(x, **options)
        assert pending._input is None
    assert kernels == ["rms_norm"] * 5
    assert (output - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 3e-2)
    with fake_step():  # not the result of a layer: nothing waits for it
        x = x * 2
        first: Any = model.layers[0]
        first(x)
        assert torch.equal(first.input_layernorm(x), model.layers[0].input_layernorm(x))  # type: ignore[operator]
        assert not torch.equal(model.layers[1].input_layernorm(x), first.input_layernorm(x))  # type: ignore[operator]
    assert (model(x, **options) - model(x, **options)).abs().max() == 0


@pytest.mark.parametrize("kind", [Scaled, NormsAfterwards, Parallel, OtherOptions])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_look_alike_stay(kind: type[Layer], dtype: torch.dtype) -> None:
    model = Model(kind).to(DEVICE, dtype)
    assert fuse(model)["residuals"] == 0
    assert all("forward" not in vars(layer) for layer in model.layers)


@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("qwen3", 2), ("mistral", 2), ("gemma2", 0), ("phi", 0)])
def test_families(family: str, layers: int) -> None:
    assert fuse(tiny(family, num_hidden_layers=2))["residuals"] == layers
