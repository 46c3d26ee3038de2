"""Linear layers of one input as one: queries, keys and values, or an MLP's gate and up.

A call costs some microseconds besides its arithmetic, and a small product keeps few cores busy. Servers with modelling
files of their own write such layers as one; here the model's first forward shows which they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn


class Call(NamedTuple):
    """A linear layer's call, by the layer's name in the module. It holds on to the input: no other is taken for it."""

    name: str
    linear: nn.Linear
    inputs: torch.Tensor


class FusedLinear(nn.Module):
    """One product in the place of several of the same input. One thread's forward at a time is fast; more are correct.

    Args:
        product: [..., in] to [..., sum of widths].
        widths: output features of each layer, in the order in which the model calls them.
    """

    def __init__(self, product: nn.Module, widths: Sequence[int]) -> None:
        super().__init__()
        self.product = product
        self._widths = list(widths)
        self._latest: tuple[torch.Tensor, Sequence[torch.Tensor]] | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The product's."""
        weight = self.product.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def part(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., widths[index]], a view. Computed for all where the input is another tensor than before;
        kept until the last layer was called."""
        latest = self._latest
        if latest is None or latest[0] is not inputs:
            latest = inputs, self.product(inputs).split(self._widths, dim=-1)
        self._latest = None if index == len(self._widths) - 1 else latest
        return latest[1][index]


class LinearPart(nn.Module):
    """Replaces one of the fused layers in a model."""

    def __init__(self, fused: FusedLinear, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.fused = fused
        self._index = index

    @property
    def weight(self) -> torch.Tensor:
        """All layers' weight, opaque: for those who ask for its dtype or device."""
        return self.fused.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.fused.part(self._index, inputs)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, part={self._index}"


@contextmanager
def watch(module: nn.Module) -> Iterator[list[Call]]:
    """Lists the calls of a module's linear layers for as long as the context lasts."""
    calls: list[Call] = []
    with ExitStack() as hooks:
        for name, child in module.named_modules():
            if type(child) is nn.Linear:
                hooks.callback(child.register_forward_pre_hook(partial(_note, calls, name)).remove)
        yield calls


def of_one_input(calls: Sequence[Call]) -> list[list[str]]:
    """Names of layers that can be one: called once each, in a row, with the same tensor, and alike in all but width."""
    times = Counter(call.name for call in calls)
    once = [call for call in calls if times[call.name] == 1]
    rows = groupby(once, lambda call: (id(call.inputs), call.linear.weight.dtype, call.linear.bias is None))
    groups = [[call.name for call in row] for _, row in rows]
    return [group for group in groups if len(group) > 1]


def joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that computes what these do, side by side."""
    first = linears[0]
    width = sum(linear.out_features for linear in linears)
    with torch.device("meta"):
        whole = nn.Linear(first.in_features, width, first.bias is not None, dtype=first.weight.dtype)
    for name, _ in first.named_parameters():
        parts = [linear.get_parameter(name).detach() for linear in linears]
        setattr(whole, name, nn.Parameter(torch.cat(parts), requires_grad=False))
    return whole


def _note(calls: list[Call], name: str, linear: nn.Linear, arguments: tuple[torch.Tensor, ...]) -> None:
    if arguments:
        calls.append(Call(name, linear, arguments[0]))
