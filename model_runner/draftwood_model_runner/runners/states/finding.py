"""Finds the mixers of a model by what they do with transformers' cache.

Linear attention, state-space layers and short convolutions all ask a cache for their state and give it the next one. So
a module that does so is a mixer, whatever it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from draftwood_model_runner.runners.model_inputs import cache_argument
from draftwood_model_runner.runners.states.mixers import AttributeMixer, Mixer


def find_mixers(module: Any) -> list[Mixer]:
    """Replaces the forward of each mixer of a model; returns them, in the order of their calls; [] for none.

    Found by calling the model twice with a cache of its own: who asks that cache for a state is a mixer.
    """
    for part in module.modules():
        if isinstance(earlier := vars(part).get("forward"), Mixer):  # of another runner
            earlier.remove()
    ids = torch.zeros(1, 3, dtype=torch.long, device=module.device)
    name = cache_argument(module.forward)
    if name is None:
        return []
    cache = module(input_ids=ids, use_cache=True).get(name)
    if cache is None:
        return _with_attributes(module, ids)
    found: dict[nn.Module, None] = {}
    with _calling() as calling:
        cache.__class__ = type("Noting", (_Noting, type(cache)), {"note": lambda self: found.setdefault(calling[-1])})
        module(input_ids=ids[:, :1], use_cache=True, **{name: cache})
    if not found:
        return _with_attributes(module, ids)
    inside = {part for outer in found for part in outer.modules() if part is not outer}
    found = {part: None for part in found if part not in inside}
    return [Mixer(index, part, str(cache_argument(part.forward))) for index, part in enumerate(found)]


def _with_attributes(module: Any, ids: torch.Tensor) -> list[Mixer]:
    """Mixers that keep their states in attributes, which each call replaces."""
    before = {part: _tensors(part) for part in module.modules()}
    module(input_ids=ids, use_cache=True)
    holders = [
        (path, part, name)
        for path, part in module.named_modules()
        for name, tensor in _tensors(part).items()
        if before[part].get(name) is not tensor
    ]
    mixers: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, part, name in holders:
        outer = next((one for one in mixers if path.startswith(one + ".")), path)
        mixers.setdefault(outer, []).append((part, name))
    return [
        AttributeMixer(index, module.get_submodule(path), held) for index, (path, held) in enumerate(mixers.items())
    ]


def _tensors(part: nn.Module) -> dict[str, torch.Tensor]:
    """Attributes that are neither parameters nor buffers."""
    return {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}


_ASKED = frozenset(
    {"get_conv_state", "get_linear_cache", "get_recurrent_state", "has_previous_state", "update_conv_state"}
)
"""Methods of a cache that mixers call; before transformers 5.21 they begin with `has_previous_state`."""


class _Noting:
    """Notes who asks a cache for a state."""

    note: Callable[[], None]

    def __getattribute__(self, name: str) -> Any:
        if name in _ASKED:
            self.note()
        return super().__getattribute__(name)


def _left(stack: list[nn.Module]) -> None:
    stack.pop()


@contextmanager
def _calling() -> Iterator[list[nn.Module]]:
    """The modules whose forward runs, outermost first."""
    stack: list[nn.Module] = []
    before = nn.modules.module.register_module_forward_pre_hook(lambda part, _: stack.append(part))
    after = nn.modules.module.register_module_forward_hook(lambda *_: _left(stack), always_call=True)
    try:
        yield stack
    finally:
        before.remove()
        after.remove()
