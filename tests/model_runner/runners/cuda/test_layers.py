"""Kernels and joined products that replace parts of a model compute the same."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.cuda import layers as fusing
from draftwood_model_runner.runners.cuda.attention import STEP
from draftwood_model_runner.runners.cuda.factory import probe
from draftwood_model_runner.runners.cuda.forward import StepBuffers, find_top
from draftwood_model_runner.runners.cuda.layers import (
    FAMILIES,
    FusedAttention,
    FusedDecoder,
    FusedMLP,
    FusedNorm,
    Fusions,
    ParallelLinears,
    fuse,
)
from draftwood_model_runner.runners.cuda.runner import CudaLayout, CudaRunner
from draftwood_model_runner.runners.cuda.sampling import TOP
from draftwood_model_runner.runners.trials import attention_calls
from tests.model_runner.families import tiny
from tests.model_runner.runners.cuda.device import DEVICE, launched
from tests.model_runner.runners.cuda.recording import Recording
from tests.model_runner.small_models import small_model

VIEWS = {"_unsafe_view", "detach", "empty", "empty_like", "expand", "new_empty", "select", "slice", "split_with_sizes"}
VIEWS |= {"t", "transpose", "unsqueeze", "view"}
"""Operations that launch nothing."""
LAYER_KERNELS = 11
"""Of a Llama layer."""


def fused_parts(module: Any) -> dict[str, int]:
    """How many parts of a model have a forward of ours, by its class."""
    counts = dict.fromkeys((kind.__name__ for kind in (FusedNorm, FusedMLP, FusedAttention, FusedDecoder)), 0)
    for part in module.modules():
        if (name := type(vars(part).get("forward")).__name__) in counts:
            counts[name] += 1
    return counts


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What Draftwood has logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("draftwood")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "norms", "mlps", "decoders"),
    [("llama", 3, 1, 1), ("qwen3", 5, 1, 1), ("gemma2", 5, 1, 0), ("gpt-neox", 0, 0, 0), ("phi", 0, 0, 0)],
)
def test_the_logits_of_the_model(
    family: str, norms: int, mlps: int, decoders: int, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 2 adds 1 to the weights of its norms, and its MLP has another activation."""
    module = tiny(family, num_hidden_layers=1).to(DEVICE, dtype)
    with caplog.at_level(logging.WARNING), launched() as kernels:
        probe(module, 64, exact=False)
    assert ours(caplog) == []
    actual = fused_parts(module)
    assert actual == {"FusedNorm": norms, "FusedMLP": mlps, "FusedAttention": int(norms > 0), "FusedDecoder": decoders}
    assert any(kernel.kernel.__name__ == "rotate" for kernel in kernels) == (norms > 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_of_the_table(family: str, caplog: pytest.LogCaptureFixture) -> None:
    module = small_model(family).to(DEVICE)
    with caplog.at_level(logging.WARNING):
        try:
            probe(module, 256, exact=False)
        except UnsupportedModelError as error:  # the runner computes none of the family
            pytest.skip(str(error))
    assert ours(caplog) == []
    actual, wanted = fused_parts(module), FAMILIES[family]
    assert actual["FusedNorm"] > 0
    assert bool(actual["FusedAttention"]) == wanted.attention
    assert bool(actual["FusedDecoder"]) == wanted.decoder


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("gemma2", FAMILIES["gemma2"]._replace(decoder=True)),
        ("llama", FAMILIES["llama"]._replace(norms_add_one=True)),
        ("phi", FAMILIES["llama"]),
        ("gpt-neox", Fusions(("input_layernorm",), mlp=False)),
    ],
)
def test_a_family_that_is_not_what_the_table_says_runs_with_its_own_modules(
    family: str, wrong: Fusions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers have other residuals, its norms other weights, its modules other names."""
    module = tiny(family, num_hidden_layers=1).to(DEVICE)
    monkeypatch.setattr(fusing, "FAMILIES", {module.config.model_type: wrong})
    with caplog.at_level(logging.WARNING):
        probe(module, 64, exact=False)
    assert sum(fused_parts(module).values()) == 0
    assert "runs without fused operations" in ours(caplog)[-1]


def test_a_model_can_be_taken_over_again() -> None:
    module = tiny("llama", num_hidden_layers=1).to(DEVICE)
    for _ in range(2):
        probe(module, 64, exact=False)
        assert fused_parts(module)["FusedDecoder"] == 1


def test_the_most_probable_tokens_of_a_large_vocabulary() -> None:
    """More than one block of it."""
    torch.manual_seed(0)
    space = StepBuffers((KVShape(1, 16, 16),), 3, 1, 1, 16, 1, DEVICE)
    space.arrays.row_count.fill_(3)
    logits = torch.randn(3, 9000, device=DEVICE)
    find_top(logits, space)
    assert torch.equal(space.top[:, :TOP].long(), logits.topk(TOP).indices)


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", LAYER_KERNELS), ("qwen3", LAYER_KERNELS + 2), ("gemma2", 16)]
)
def test_kernels_of_a_layer(family: str, expected: int) -> None:
    """Qwen 3 norms heads of queries and keys; the layers of Gemma 2 have other residuals and another activation."""
    of_one_layer, of_two_layers = (kernels_of_a_step(family, layers) for layers in (1, 2))
    assert len(of_two_layers) - len(of_one_layer) == expected, (of_one_layer, of_two_layers)
    if family == "llama":
        assert len(of_one_layer) - expected == 16, of_one_layer
        assert f"{expected} kernels a Llama layer" in Path("docs/internals.md").read_text()


@torch.no_grad()  # in inference mode torch hides what operations such as `linear` and `reshape` consist of
def kernels_of_a_step(family: str, layers: int) -> list[str]:
    """What a step of a model launches."""
    module = tiny(family, num_hidden_layers=layers).to(DEVICE)
    calls = attention_calls(module, 64)
    STEP.install(module)
    fuse(module, [call.options for call in calls])
    layout = CudaLayout(tuple(call.shape for call in calls), calls[0].group, calls[0].dtype, DEVICE)
    forward = CudaRunner(module, layout, 64, graphs=False)._forward
    step = forward.prepare_padding(1, forward.row_choices[0])
    notes = Recording(forward, step)._noted
    names = [re.split(r"[(. ]", note.removeprefix("aten::"))[0] for note in notes]
    return [name for name in names if name not in VIEWS]


def test_weights_stay_what_they_were_in_no_more_memory() -> None:
    module = tiny("qwen2", num_hidden_layers=2)  # whose queries, keys and values have biases

    def storages() -> dict[int, int]:
        memory = (parameter.untyped_storage() for parameter in module.parameters())
        return {tensor.data_ptr(): tensor.nbytes() for tensor in memory}

    parameters, size = dict(module.named_parameters()), storages()
    before = {name: weight.detach().clone() for name, weight in parameters.items()}
    assert fuse(module, [{}, {}])
    after = dict(module.named_parameters())
    assert list(after) == list(before)
    for name, weight in after.items():
        assert weight is parameters[name]
        assert torch.equal(weight, before[name]), name
    assert sum(storages().values()) == sum(size.values())
    assert len(storages()) == len(size) - 2 * (2 + 2 + 1)


def layers(kind: type[nn.Linear] = nn.Linear) -> list[nn.Linear]:
    return [kind(32, width, device=DEVICE) for width in (32, 16, 16)]


class Adapted(nn.Linear):
    """What an adapter of low rank or a quantized layer is."""


class Packed(torch.Tensor):
    """What a quantized weight is in a plain layer, such as torchao's."""


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "quantized": lambda parts: setattr(
        parts[1], "weight", nn.Parameter(parts[1].weight.detach().as_subclass(Packed), requires_grad=False)
    ),
    "without a bias": lambda parts: setattr(parts[1], "bias", None),
    "of another dtype": lambda parts: parts[2].half(),
    "hooked": lambda parts: parts[0].register_forward_pre_hook(lambda layer, inputs: None),
    "replaced": lambda parts: setattr(parts[0], "forward", parts[0].forward),
    "derived": lambda parts: parts.__setitem__(slice(None), layers(kind=Adapted)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_layers_that_are_not_alike_or_not_plain_stay(change: Callable[[list[Any]], object]) -> None:
    parts = layers()
    change(parts)
    assert not ParallelLinears(parts, join=True).joined
