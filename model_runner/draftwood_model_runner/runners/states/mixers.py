"""The layers of a model that carry a state from token to token: "state in, tokens in, outputs out".

The forward of such a module is replaced; the modelling code is not touched. `finding` tells which modules these are.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from draftwood_model_runner.runners.states.scanning import Scan, scanning

State: TypeAlias = dict[tuple[str, int], torch.Tensor]
"""What one mixer remembers of sequences, by kind and number: each tensor [sequences, ...]; {} at the beginning."""


class LayerView(NamedTuple):
    """Stands in for a layer of transformers' cache; states by number."""

    conv_states: dict[int, torch.Tensor]
    recurrent_states: dict[int, torch.Tensor]
    record_past: bool = True


class StateView:
    """Stands in for transformers' cache in one call of a mixer, with the state that it begins from.

    Attributes:
        state: that of the tokens so far. Mixers may change its tensors in place.
    """

    def __init__(self, state: State) -> None:
        self.state = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.state.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.state.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As mixers ask before transformers 5.21; they then read the states of `layers`."""
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
        """True: a mixer is to add its inputs to the convolution's by `update_conv_state`, one or several."""
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
        """As MiniMax calls it."""
        return self.state.get(("linear", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.state["linear", 0] = linear_cache


class MixerCall(NamedTuple):
    """One call of a mixer, taken apart.

    Attributes:
        values: its arguments, flattened; each tensor of the step's tokens is [1, T, ...].
        spec: puts them together again.
        by_token: which of `values` hold something for each token.
    """

    values: list[Any]
    spec: TreeSpec
    by_token: list[int]


class StepOfMixers(Protocol):
    """What computes the mixers of a step."""

    def run(self, mixer: Mixer, call: MixerCall) -> Any: ...

    @property
    def width(self) -> int: ...


STEP: ContextVar[StepOfMixers | None] = ContextVar("draftwood_mixers", default=None)
"""The step that the model of this thread computes; None outside of steps, where mixers compute what they did."""


class Mixer:
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
        return step.run(self, MixerCall(values, spec, by_token))

    @property
    def can_scan(self) -> bool:
        return self._scanning is not None

    def scan(self, call: MixerCall, scan: Scan) -> Any:
        """Outputs for all tokens of the step, with the states of the scan.

        Raises:
            ValueError: the mixer keeps something else.
        """
        assert self._scanning is not None
        bound = self._bound(call.values, call.spec, scan)
        return self._scanning(scan, *bound.args, **bound.kwargs)

    def compute(self, call: MixerCall, inputs: list[torch.Tensor], state: State) -> tuple[Any, State]:
        """Outputs and the next state.

        Args:
            inputs: those `by_token`, each [n, L, ...].
            state: [n, ...] in each tensor; may be changed in place.
        """
        if not (self.one_by_one and state and inputs[0].shape[1] > 1):
            return self._once(call, inputs, state)
        outputs: list[list[Any]] = []
        for at in range(inputs[0].shape[1]):
            one, state = self._once(call, [each[:, at : at + 1] for each in inputs], state)
            values, spec = tree_flatten(one)
            outputs.append(values)
        joined = [
            torch.cat(of_tokens, 1) if _has_tokens(of_tokens[0], inputs[0].shape[0], 1) else of_tokens[-1]
            for of_tokens in map(list, zip(*outputs, strict=True))
        ]
        return tree_unflatten(joined, spec), state

    def _once(self, call: MixerCall, inputs: list[torch.Tensor], state: State) -> tuple[Any, State]:
        view = StateView(state)
        return self._called(call, inputs, view), view.state

    def _called(self, call: MixerCall, inputs: list[torch.Tensor], cache: Any) -> Any:
        values = [*call.values]
        for at, value in zip(call.by_token, inputs, strict=True):
            values[at] = value
        bound = self._bound(values, call.spec, cache)
        return self._forward(*bound.args, **bound.kwargs)

    def _bound(self, values: list[Any], spec: TreeSpec, cache: Any) -> inspect.BoundArguments:
        return inspect.BoundArguments(self._signature, tree_unflatten(values, spec) | {self._cache_name: cache})


class AttributeMixer(Mixer):
    """A layer that keeps its state in attributes of its own and of the modules in it, as RecurrentGemma's do.

    Args:
        holders: the modules that hold it, each with the name of the attribute.
    """

    def __init__(self, index: int, part: nn.Module, holders: list[tuple[nn.Module, str]]) -> None:
        super().__init__(index, part, "use_cache")
        self._holders = holders

    def _once(self, call: MixerCall, inputs: list[torch.Tensor], state: State) -> tuple[Any, State]:
        for number, (holder, name) in enumerate(self._holders):
            setattr(holder, name, state.get((name, number)))
        outputs = self._called(call, inputs, True)
        return outputs, {(name, number): getattr(holder, name) for number, (holder, name) in enumerate(self._holders)}


def _has_tokens(value: Any, sequences: int, tokens: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (sequences, tokens)
