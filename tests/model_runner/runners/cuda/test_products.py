"""Linear layers of one input, joined into one product."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from draftwood_model_runner.loading.fingerprint import fingerprint
from draftwood_model_runner.loading.model import BUNDLED_MODEL
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.runners.cuda.fusing.model import fuse
from draftwood_model_runner.runners.cuda.fusing.products import join_products
from tests.model_runner.families import tiny
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.fake_step import fake_step

NAMES = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Nothing but its linear layers."""

    def __init__(self, bias: bool = True, kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (kind(32, width, bias, device=DEVICE) for width in (32, 16, 16))

    def layers(self) -> list[nn.Module]:
        return [self.get_submodule(name) for name in NAMES]


def storages(module: nn.Module) -> dict[int, int]:
    """Bytes of the memory of a module's parameters, by where it is."""
    memory = (parameter.untyped_storage() for parameter in module.parameters())
    return {one.data_ptr(): one.nbytes() for one in memory}


def test_weights_stay_what_they_were_in_no_more_memory() -> None:
    module = tiny("qwen2", num_hidden_layers=2)  # whose queries, keys and values have biases
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(BUNDLED_MODEL))
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    parameters, size, identity = dict(module.named_parameters()), storages(module), fingerprint(module, tokenizer)
    assert fuse(module)["joined products"] == 2 * 3
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
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_one_product_in_a_step(bias: bool, order: tuple[int, ...]) -> None:
    attention = Attention(bias)
    x = torch.randn(1, 3, 32, device=DEVICE)
    with torch.inference_mode():
        expected = [layer(x) for layer in attention.layers()]
        assert join_products(attention) == 2
        with fake_step() as pending:
            parts = {place: attention.layers()[place](x) for place in order}
            assert pending._input is None
        alone = [layer(x) for layer in attention.layers()]
    assert len({part.untyped_storage().data_ptr() for part in parts.values()}) == 1
    assert len({part.untyped_storage().data_ptr() for part in alone}) == 3
    for place, right in enumerate(expected):
        assert torch.allclose(parts[place], right, atol=1e-6)
        assert torch.equal(alone[place], right)


@torch.inference_mode()
def test_nothing_is_mixed_up() -> None:
    """Other inputs in between, the same layer again, another model, and a step that failed."""
    one, other = Attention(), Attention()
    calls: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []
    x, y = torch.randn(2, 1, 3, 32, device=DEVICE)
    for attention, place, inputs in [
        (one, 0, x), (one, 1, y), (one, 2, x), (one, 2, x), (one, 0, y), (other, 0, y), (one, 1, y), (other, 1, y),
        (one, 0, x),
    ]:  # fmt: skip
        layer = attention.layers()[place]
        calls.append((layer, inputs, layer(inputs)))
    join_products(one)
    join_products(other)
    with fake_step():
        for layer, inputs, right in calls:
            assert torch.allclose(layer(inputs), right, atol=1e-6)
    with fake_step():  # x still waited for the other parts when the last step ended
        layer, inputs, right = calls[2]
        assert torch.allclose(layer(inputs), right, atol=1e-6)


@torch.inference_mode()
def test_a_step_that_fails_keeps_nothing_alive() -> None:
    attention = Attention()
    narrow = nn.Linear(1, 1, device=DEVICE)
    join_products(attention)

    def failing() -> weakref.ref[torch.Tensor]:
        x = torch.randn(1, 3, 32, device=DEVICE)
        with pytest.raises(RuntimeError), fake_step():
            narrow(attention.q_proj(x))
        return weakref.ref(x)

    assert failing()() is None


class Adapted(nn.Linear):
    """What an adapter of low rank or a quantized layer is."""


class Packed(torch.Tensor):
    """What a quantized weight is in a plain layer, such as torchao's."""


def one_bias(attention: Attention) -> None:
    attention.k_proj.bias = None  # type: ignore[assignment]


def one_dtype(attention: Attention) -> None:
    attention.v_proj.half()


def hooked(attention: Attention) -> None:
    attention.q_proj.register_forward_pre_hook(lambda layer, inputs: None)


def replaced(attention: Attention) -> None:
    attention.q_proj.forward = attention.q_proj.forward  # type: ignore[method-assign]


def quantized(attention: Attention) -> None:
    weight = attention.k_proj.weight.detach().as_subclass(Packed)
    attention.k_proj.weight = nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize("change", [quantized, one_bias, one_dtype, hooked, replaced])
def test_layers_that_are_not_alike_or_not_plain_stay(change: Callable[[Attention], None]) -> None:
    attention = Attention()
    change(attention)
    assert join_products(attention) == 0
    assert join_products(Attention(kind=Adapted)) == 0


def test_nothing_is_joined_in_exact_mode() -> None:
    assert fuse(tiny("llama", num_hidden_layers=1), exact=True)["joined products"] == 0
