"""One call of a recurrent layer for all tokens of a step, with functions of ours in place of those of transformers.

A recurrent layer of transformers projects its inputs, mixes them along the sequence by functions that a package or the
hub may replace (causal_conv1d, fla, mamba_ssm), and projects the result. `scanning` puts functions there that follow
the draft trees of a step from each sequence's state. So the weights are read once, and a prefix that paths share is
computed once. A layer that uses other such functions is not computed this way.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

FINAL = torch.empty(0)
"""In place of the last state, which the scan keeps itself."""

_REPLACED = {
    "causal_conv1d_fn": "convolve",
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "state_space",
}
_OTHERS = frozenset({"mamba_selective_scan", "mamba_inner_fn"})
"""Recurrences that are not replaced."""


class Convolution(NamedTuple):
    """What a recurrent layer's convolution is called with.

    Attributes:
        number: among those of the recurrent layer.
        inputs: [1, C, tokens].
        weight: [C, K]; bias: [C].
    """

    number: int
    inputs: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None


class StateSpace(NamedTuple):
    """What Mamba 2's recurrence is called with.

    Attributes:
        inputs: x, [1, tokens, heads, columns].
        dt: [1, tokens, heads], time steps as the recurrent layer computes them, see `time_steps`.
        rates: A, [heads].
        written, read: B and C, [1, tokens, groups, rows].
        skips: D, [heads].
        bias, softplus, limit: of `time_steps`.
    """

    inputs: torch.Tensor
    dt: torch.Tensor
    rates: torch.Tensor
    written: torch.Tensor
    read: torch.Tensor
    skips: torch.Tensor | None
    bias: torch.Tensor | None
    softplus: bool
    limit: tuple[float, float]


class Scan(ABC):
    """Stands in for transformers' cache, and for its functions, in one call of a recurrent layer."""

    def __init__(self) -> None:
        self._pending: tuple[int, torch.Tensor] | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """None: `convolve` has it."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """None: the recurrence has it."""
        return None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """False, as `get_conv_state`. Recurrent layers ask before transformers 5.21."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        self._pending = state_idx, conv_states
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        if recurrent_states is not FINAL:
            raise ValueError("the recurrent layer computes a state by a function of its own")
        return recurrent_states

    def convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As `causal_conv1d_fn`: [1, C, tokens] by weights [C, K]."""
        if self._pending is None or self._pending[1] is not hidden_states:
            raise ValueError("the recurrent layer convolves something else than what it keeps")
        number, self._pending = self._pending[0], None
        return self.convolve_inputs(Convolution(number, hidden_states, weight, bias, activation))

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`, over [1, tokens, heads, ...].

        Raises:
            ValueError: queries and keys are not to be normalized.
        """
        if not use_qk_l2norm_in_kernel:
            raise ValueError("the delta rule is computed for normalized queries and keys only")
        return self.scan_deltas(query, key, value, g, beta), FINAL

    def state_space(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As `mamba2_chunk_scan`, over [1, tokens, heads, ...].

        Raises:
            ValueError: the outputs are to be gated.
        """
        if z is not None:
            raise ValueError("the state space is computed without a gate")
        output = self.scan_states(StateSpace(hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit))
        return (output, FINAL) if return_final_states else output

    @abstractmethod
    def convolve_inputs(self, call: Convolution) -> torch.Tensor:
        """Outputs [1, C, tokens]."""

    @abstractmethod
    def scan_deltas(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Outputs [1, tokens, heads, columns] of the gated delta rule with normalized queries and keys.

        Args:
            query, key: [1, tokens, groups, rows]; value: [1, tokens, heads, columns].
            g: logarithms of decays, [1, tokens, heads], or of each row of a state, [1, tokens, heads, rows].
            beta: [1, tokens, heads].
        """

    @abstractmethod
    def scan_states(self, given: StateSpace) -> torch.Tensor:
        """Outputs [1, tokens, heads, columns] of Mamba 2's recurrence."""


def time_steps(
    dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool, limit: tuple[float, float], is_prompt: torch.Tensor
) -> torch.Tensor:
    """float32[T, H]: time steps of a state space from what a recurrent layer computes, [T, H]. They are limited in
    prompts only: transformers computes written tokens one by one, where it does not limit them.

    Args:
        is_prompt: bool[T], which tokens are of a prompt.
    """
    steps = dt if bias is None else dt + bias.to(dt.dtype)
    steps = (nn.functional.softplus(steps) if softplus else steps).float()
    return torch.where(is_prompt[:, None], steps.clamp(*limit), steps)


def scanning(part: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The forward of a recurrent layer with the functions of a scan, which is its first argument; None where that
    cannot be.

    The functions are looked up in a copy of the forward's globals, so that nothing else changes.
    """
    plain = inspect.unwrap(getattr(forward, "__func__", forward))
    if not isinstance(plain, FunctionType):
        return None
    names = {*plain.__code__.co_names}
    if not names & _REPLACED.keys() or names & _OTHERS:
        return None
    current: list[Scan] = []

    def standing_in(method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(current[-1], method)(*args, **kwargs)

    functions = {name: standing_in(method) for name, method in _REPLACED.items() if name in names}
    copied = FunctionType(
        plain.__code__, plain.__globals__ | functions, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copied.__kwdefaults__ = plain.__kwdefaults__

    def scanned(scan: Scan, *args: Any, **kwargs: Any) -> Any:
        current.append(scan)
        try:
            return copied(part, *args, **kwargs)
        finally:
            current.pop()

    return scanned
