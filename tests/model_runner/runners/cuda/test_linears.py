"""Linear layers of one input, joined into one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from draftwood_model_runner.loading.fingerprint import fingerprint
from draftwood_model_runner.runners.cuda.fusing.linears import ParallelLinears
from draftwood_model_runner.runners.cuda.fusing.model import fuse
from tests.model_runner.families import bundled_tokenizer, tiny
from tests.model_runner.runners.cuda.device import DEVICE

Layers = list[nn.Linear]


def layers(bias: bool = True, kind: type[nn.Linear] = nn.Linear) -> Layers:
    return [kind(32, width, bias, device=DEVICE) for width in (32, 16, 16)]


def storages(module: nn.Module) -> dict[int, int]:
    """Bytes of the memory of a module's parameters, by where it is."""
    memory = (parameter.untyped_storage() for parameter in module.parameters())
    return {one.data_ptr(): one.nbytes() for one in memory}


def test_weights_stay_what_they_were_in_no_more_memory() -> None:
    module = tiny("qwen2", num_hidden_layers=2)  # whose queries, keys and values have biases
    tokenizer = bundled_tokenizer()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    parameters, size, identity = dict(module.named_parameters()), storages(module), fingerprint(module, tokenizer)
    assert fuse(module, [{}, {}])
    assert {name: id(one) for name, one in module.named_parameters()} == {
        name: id(one) for name, one in parameters.items()
    }
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert fingerprint(module, tokenizer) == identity
    assert sum(storages(module).values()) == sum(size.values())
    assert len(storages(module)) == len(size) - 2 * (2 + 2 + 1)


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_one_product(bias: bool) -> None:
    alone = layers(bias)
    x = torch.randn(1, 3, 32, device=DEVICE)
    expected = [layer(x) for layer in alone]
    products = ParallelLinears(alone, join=True)
    assert products.joined
    parts = products(x)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    for layer, part, right in zip(alone, parts, expected, strict=True):
        assert torch.allclose(part, right, atol=1e-6)
        assert torch.equal(layer(x), right)


class Adapted(nn.Linear):
    """What an adapter of low rank or a quantized layer is."""


class Packed(torch.Tensor):
    """What a quantized weight is in a plain layer, such as torchao's."""


def one_bias(parts: Layers) -> None:
    parts[1].bias = None  # type: ignore[assignment]


def one_dtype(parts: Layers) -> None:
    parts[2].half()


def hooked(parts: Layers) -> None:
    parts[0].register_forward_pre_hook(lambda layer, inputs: None)


def replaced(parts: Layers) -> None:
    parts[0].forward = parts[0].forward  # type: ignore[method-assign]


def quantized(parts: Layers) -> None:
    weight = parts[1].weight.detach().as_subclass(Packed)
    parts[1].weight = nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize("change", [quantized, one_bias, one_dtype, hooked, replaced])
def test_layers_that_are_not_alike_or_not_plain_stay(change: Callable[[Layers], None]) -> None:
    parts = layers()
    change(parts)
    assert not ParallelLinears(parts, join=True).joined
    assert not ParallelLinears(layers(kind=Adapted), join=True).joined


@torch.inference_mode()
def test_nothing_is_joined_in_exact_mode() -> None:
    module = tiny("llama", num_hidden_layers=1)
    fuse(module, [{}], exact=True)
    layer: Any = module.model.layers[0]
    assert not layer.mlp.forward.products.joined
    assert not layer.self_attn.forward.products.joined
    x = torch.randn(1, 3, 64)
    assert torch.equal(layer.self_attn.forward.products(x)[1], layer.self_attn.k_proj(x))
