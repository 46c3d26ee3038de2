"""The layers of a model that carry a state from token to token: "state in, tokens in, outputs out".

Linear attention, state-space layers and short convolutions all ask transformers' cache for their state and give it the
next one. So a module that does so is a recurrent layer, whatever it computes. Its forward is replaced, and the
modelling code is not touched.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from draftwood_model_runner.runners.model_calls import cache_argument
from draftwood_model_runner.runners.scanning import Scan, scanning

State: TypeAlias = dict[tuple[str, int], torch.Tensor]
"""What one recurrent layer remembers of sequences, by kind and number: each tensor [sequences, ...]; {} at the
beginning."""

STEP: ContextVar[RecurrentStep | None] = ContextVar("draftwood_recurrent", default=None)
"""The step that the model of this thread computes; None outside of steps, where recurrent layers compute what they
did."""
_ASKED = frozenset(
    {"get_conv_state", "get_linear_cache", "get_recurrent_state", "has_previous_state", "update_conv_state"}
)
"""Methods of a cache that recurrent layers call; before transformers 5.21 they begin with `has_previous_state`."""


class LayerView(NamedTuple):
    """Stands in for a layer of transformers' cache; states by number."""

    conv_states: dict[int, torch.Tensor]
    recurrent_states: dict[int, torch.Tensor]
    record_past: bool = True


class StateView:
    """Stands in for transformers' cache in one call of a recurrent layer, with the state that it begins from.

    Attributes:
        state: that of the tokens so far. Recurrent layers may change its tensors in place.
    """

    def __init__(self, state: State) -> None:
        self.state = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.state.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.state.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Layers ask so before transformers 5.21, and then read the states of `layers`."""
        return bool(self.state)

    @property
    def layers(self) -> Mapping[int, LayerView]:
        """The same states for every index of a layer."""
        conv, recurrent = (
            {number: tensor for (of, number), tensor in self.state.items() if of == kind}
            for kind in ("conv", "recurrent")
        )
        view = LayerView(conv, recurrent)
        return defaultdict(lambda: view)

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: a recurrent layer is to add its inputs to the convolution's by `update_conv_state`, one or several."""
        return True

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Keeps the last inputs of a convolution; returns them all, those before the new ones as well."""
        before, width = self.state.get(("conv", state_idx)), conv_kernel_size or conv_states.shape[-1]
        seen = conv_states if before is None else torch.cat([before, conv_states], -1)
        if seen.shape[-1] < width:
            seen = nn.functional.pad(seen, (width - seen.shape[-1], 0))
        self.state["conv", state_idx] = seen[..., -width:].clone()
        return seen

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self.state["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The state of MiniMax's layers, which call it so."""
        return self.state.get(("linear", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.state["linear", 0] = linear_cache


class LayerCall(NamedTuple):
    """One call of a recurrent layer, taken apart.

    Attributes:
        values: its arguments, flattened; each tensor of the step's tokens is [1, T, ...].
        spec: puts them together again.
        by_token: which of `values` hold something for each token.
    """

    values: list[Any]
    spec: TreeSpec
    by_token: list[int]


class RecurrentStep(Protocol):
    """What computes the recurrent layers of a step."""

    def run(self, layer: RecurrentLayer, call: LayerCall) -> Any: ...

    @property
    def width(self) -> int: ...


class RecurrentLayer:
    """A layer with a state.

    Attributes:
        index: which of the model's.
        part: the module.
        one_by_one: once it has a state, it must be given one token at a time.
        scans: all tokens of a step are computed in one call, see `scan`.
    """

    def __init__(self, index: int, part: nn.Module, cache_name: str) -> None:
        self.index = index
        self.part = part
        self.one_by_one = self.scans = False
        self._forward: Callable[..., Any] = part.forward
        self._scanning = scanning(part, part.forward)
        self._signature = inspect.signature(part.forward)
        self._cache_name = cache_name
        self._replaced = vars(part).get("forward")
        part.forward = functools.wraps(part.forward)(self)

    def remove(self) -> None:
        """Gives the module its own forward back."""
        if self._replaced is None:
            del self.part.forward
        else:
            self.part.forward = self._replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = STEP.get()
        if step is None:
            return self._forward(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if name != self._cache_name}
        values, spec = tree_flatten(given)
        by_token = [at for at, value in enumerate(values) if _has_tokens(value, 1, step.width)]
        return step.run(self, LayerCall(values, spec, by_token))

    @property
    def can_scan(self) -> bool:
        return self._scanning is not None

    def scan(self, call: LayerCall, scan: Scan) -> Any:
        """Outputs for all tokens of the step, with the states of the scan.

        Raises:
            ValueError: the recurrent layer keeps something else.
        """
        assert self._scanning is not None
        bound = self._bound(call.values, call.spec, scan)
        return self._scanning(scan, *bound.args, **bound.kwargs)

    def compute(self, call: LayerCall, inputs: list[torch.Tensor], state: State) -> tuple[Any, State]:
        """Outputs and the next state.

        Args:
            inputs: those `by_token`, each [n, L, ...].
            state: [n, ...] in each tensor; may be changed in place.
        """
        if not (self.one_by_one and state and inputs[0].shape[1] > 1):
            return self._once(call, inputs, state)
        outputs: list[list[Any]] = []
        for at in range(inputs[0].shape[1]):
            token_outputs, state = self._once(call, [each[:, at : at + 1] for each in inputs], state)
            values, spec = tree_flatten(token_outputs)
            outputs.append(values)
        joined = [
            torch.cat(of_tokens, 1) if _has_tokens(of_tokens[0], inputs[0].shape[0], 1) else of_tokens[-1]
            for of_tokens in map(list, zip(*outputs, strict=True))
        ]
        return tree_unflatten(joined, spec), state

    def _once(self, call: LayerCall, inputs: list[torch.Tensor], state: State) -> tuple[Any, State]:
        view = StateView(state)
        return self._called(call, inputs, view), view.state

    def _called(self, call: LayerCall, inputs: list[torch.Tensor], cache: Any) -> Any:
        values = [*call.values]
        for at, value in zip(call.by_token, inputs, strict=True):
            values[at] = value
        bound = self._bound(values, call.spec, cache)
        return self._forward(*bound.args, **bound.kwargs)

    def _bound(self, values: list[Any], spec: TreeSpec, cache: Any) -> inspect.BoundArguments:
        return inspect.BoundArguments(self._signature, tree_unflatten(values, spec) | {self._cache_name: cache})


class AttributeLayer(RecurrentLayer):
    """A layer that keeps its state in attributes of its own and of the modules in it, as RecurrentGemma's do.

    Args:
        holders: the modules that hold it, each with the name of the attribute.
    """

    def __init__(self, index: int, part: nn.Module, holders: list[tuple[nn.Module, str]]) -> None:
        super().__init__(index, part, "use_cache")
        self._holders = holders

    def _once(self, call: LayerCall, inputs: list[torch.Tensor], state: State) -> tuple[Any, State]:
        for number, (holder, name) in enumerate(self._holders):
            setattr(holder, name, state.get((name, number)))
        outputs = self._called(call, inputs, True)
        return outputs, {(name, number): getattr(holder, name) for number, (holder, name) in enumerate(self._holders)}


def _has_tokens(value: Any, sequences: int, tokens: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (sequences, tokens)


def find_recurrent_layers(module: Any) -> list[RecurrentLayer]:
    """Replaces the forward of each recurrent layer of a model; returns them, in the order of their calls; [] for none.

    Found by calling the model twice with a cache of its own: who asks that cache for a state is a recurrent layer.
    """
    for part in module.modules():
        if isinstance(earlier := vars(part).get("forward"), RecurrentLayer):  # of another runner
            earlier.remove()
    ids = torch.zeros(1, 3, dtype=torch.long, device=module.device)
    name = cache_argument(module.forward)
    if name is None:
        return []
    cache = module(input_ids=ids, use_cache=True).get(name)
    if cache is None:
        return _with_attributes(module, ids)
    parts: dict[nn.Module, None] = {}
    with _calling() as calling:
        cache.__class__ = type("Noting", (_Noting, type(cache)), {"note": lambda self: parts.setdefault(calling[-1])})
        module(input_ids=ids[:, :1], use_cache=True, **{name: cache})
    if not parts:
        return _with_attributes(module, ids)
    inside = {part for outer in parts for part in outer.modules() if part is not outer}
    parts = {part: None for part in parts if part not in inside}
    return [RecurrentLayer(index, part, str(cache_argument(part.forward))) for index, part in enumerate(parts)]


def _with_attributes(module: Any, ids: torch.Tensor) -> list[RecurrentLayer]:
    """Recurrent layers that keep their states in attributes, which each call replaces."""
    before = {part: _tensors(part) for part in module.modules()}
    module(input_ids=ids, use_cache=True)
    holders = [
        (path, part, name)
        for path, part in module.named_modules()
        for name, tensor in _tensors(part).items()
        if before[part].get(name) is not tensor
    ]
    recurrent_layers: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, part, name in holders:
        outer = next((holder for holder in recurrent_layers if path.startswith(holder + ".")), path)
        recurrent_layers.setdefault(outer, []).append((part, name))
    return [
        AttributeLayer(index, module.get_submodule(path), held)
        for index, (path, held) in enumerate(recurrent_layers.items())
    ]


def _tensors(part: nn.Module) -> dict[str, torch.Tensor]:
    """Attributes that are neither parameters nor buffers."""
    return {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}


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
