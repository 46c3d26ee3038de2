"""The mixers of a step by kernels over the draft trees of all sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftwood_model_runner.runners.cuda.constants import CONVOLUTION_BLOCK, STATE_BLOCK
from draftwood_model_runner.runners.cuda.device.launching import Machine, launch
from draftwood_model_runner.runners.cuda.kernels.states import convolve, recurrence
from draftwood_model_runner.runners.cuda.states.arrays import StateArrays
from draftwood_model_runner.runners.cuda.states.memory import MixerStates
from draftwood_model_runner.runners.cuda.states.shapes import STATE_NODES
from draftwood_model_runner.runners.cuda.steps.attention import power_of_2
from draftwood_model_runner.runners.states.mixers import Mixer, MixerCall
from draftwood_model_runner.runners.states.scanning import Convolution, Scan, StateSpace, time_steps

_PROGRAMS = 2
"""Programs of a recurrence for each one of attention that runs side by side."""


class DeviceScan(Scan):
    """One call of a mixer. `shapes` has checked what it is called with.

    Args:
        states: its memory.
        arrays: the step.
    """

    def __init__(self, states: MixerStates, arrays: StateArrays, machine: Machine) -> None:
        super().__init__()
        self._states, self._arrays, self._machine = states, arrays, machine

    def convolve_inputs(self, call: Convolution) -> torch.Tensor:
        number, inputs, weight, bias, activation = call
        memory, arrays, tokens = self._states.convolutions[number], self._arrays, inputs.shape[2]
        channels, width = weight.shape
        output = inputs.new_empty(tokens, channels)
        launch(
            convolve,
            (tokens, -(-channels // CONVOLUTION_BLOCK)),
            *(inputs, weight.contiguous(), weight if bias is None else bias, output, memory.states, memory.nodes),
            *(arrays.rows, arrays.walk, arrays.token_rows, arrays.parents, inputs.stride(2), inputs.stride(1)),
            CHANNELS=channels,
            BLOCK=CONVOLUTION_BLOCK,
            WIDTH=width,
            NODES=STATE_NODES,
            BIASED=bias is not None,
            SILU=activation is not None,
        )
        return output.t()[None]

    def scan_deltas(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        return self._recurrence((query, key, value), (g[0].contiguous(), beta[0].contiguous()), None)

    def scan_states(self, given: StateSpace) -> torch.Tensor:
        of_prompts = self._arrays.is_prompt[: given.dt.shape[1]] != 0
        steps = time_steps(given.dt[0], given.bias, given.softplus, given.limit, of_prompts).contiguous()
        rates = given.rates.float().contiguous()
        skips = torch.zeros_like(rates) if given.skips is None else given.skips.float().contiguous()
        return self._recurrence((given.read, given.written, given.inputs), (steps, rates), skips)

    def _recurrence(
        self,
        vectors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        gates: tuple[torch.Tensor, torch.Tensor],
        skips: torch.Tensor | None,
    ) -> torch.Tensor:
        """Outputs [1, T, heads, columns], see `kernels.states.recurrence`.

        Args:
            vectors: queries and keys [1, T, groups, rows], values [1, T, heads, columns].
            gates: with what scales the states and what is added to them.
            skips: of Mamba 2; None for the delta rule.
        """
        memory, arrays = self._states.recurrence, self._arrays
        assert memory is not None
        query, key, value = (_with_heads(part[0]) for part in vectors)
        output = value.new_zeros(value.shape)
        (heads, columns), (groups, rows) = value.shape[1:], key.shape[1:]
        row_block = power_of_2(rows)
        column_block = max(1, min(power_of_2(columns), STATE_BLOCK // row_block))
        items = value.shape[0] * heads * -(-columns // column_block)
        nodes = (*memory.nodes, memory.states)[:4]  # Mamba 2 has three inputs of a node
        launch(
            recurrence,
            (min(items, _PROGRAMS * self._machine.programs),),
            *(query, key, value, *gates, memory.states if skips is None else skips, output, memory.states, *nodes),
            *(arrays.rows, arrays.row_count, arrays.walk),
            *(query.stride(0), key.stride(0), value.stride(0), rows**-0.5),
            HEADS=heads,
            GROUPS=groups,
            KEY_DIM=rows,
            KEY_BLOCK=row_block,
            VALUE_DIM=columns,
            VALUE_BLOCK=column_block,
            NODES=STATE_NODES,
            DELTA=skips is None,
        )
        return output[None]


class DeviceStep:
    """Implements `mixers.StepOfMixers`.

    Attributes:
        width: tokens of the step with padding.
    """

    def __init__(self, states: Sequence[MixerStates], arrays: StateArrays, width: int, machine: Machine) -> None:
        self._states, self._arrays, self._machine = states, arrays, machine
        self.width = width

    def run(self, mixer: Mixer, call: MixerCall) -> Any:
        return mixer.scan(call, DeviceScan(self._states[mixer.index], self._arrays, self._machine))


def _with_heads(tensor: torch.Tensor) -> torch.Tensor:
    """[T, head, size] with the numbers of all heads of a token side by side."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()
