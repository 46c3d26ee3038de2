"""The kernels of recurrent layers as they ship, see `specialisations`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from draftwood_benchmarks.kernels.specialisations import CPU
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.cuda.device.launching import Machine
from draftwood_model_runner.runners.cuda.states.arrays import StateArrays, StateLayout
from draftwood_model_runner.runners.cuda.states.memory import allocated
from draftwood_model_runner.runners.cuda.states.scan import DeviceScan
from draftwood_model_runner.runners.cuda.states.shapes import ConvolutionShape, Input, MixerShape, RecurrenceShape

_TOKENS, _HEADS, _GROUPS = 16, 32, 16
_WIDTH = 4
"""Inputs of a convolution."""


class StateVariant(NamedTuple):
    """What a recurrent layer is compiled for.

    Attributes:
        kind: "delta_rule" or "state_space"; the convolution before it too.
        rows, columns: of the state of a head.
    """

    kind: str
    rows: int
    columns: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} {self.rows} x {self.columns} {dtype}"

    def run(self, capability: int) -> None:
        """Launches what a mixer launches on a GPU of this compute capability."""
        _mix(self, capability)


STATE_VARIANTS = (
    StateVariant("delta_rule", 128, 128),  # Qwen 3 Next and 3.5
    StateVariant("delta_rule", 128, 128, torch.float16),
    StateVariant("delta_rule", 128, 128, torch.float32),
    StateVariant("delta_rule", 96, 192),  # Olmo Hybrid
    StateVariant("state_space", 64, 64),  # Zamba 2
    StateVariant("state_space", 128, 64),  # Bamba, Granite 4, Nemotron H
    StateVariant("state_space", 128, 128),  # Falcon H1
    StateVariant("state_space", 256, 64),
    StateVariant("state_space", 256, 64, torch.float32),
    StateVariant("state_space", 256, 128),
)


def _mix(variant: StateVariant, capability: int) -> None:
    kind, rows, columns, dtype = variant
    channels = 2 * _GROUPS * rows + _HEADS * columns
    key, value = Input((_GROUPS, rows), dtype), Input((_HEADS, columns), dtype)
    number = Input((_HEADS,), torch.float32)
    inputs = (key, value, number, Input((_HEADS,), dtype)) if kind == "delta_rule" else (key, value, number)
    recurrence = RecurrenceShape(_HEADS, rows, columns, inputs)
    shape = MixerShape((ConvolutionShape(channels, _WIDTH, dtype),), recurrence)
    (states,) = allocated((shape,), 1, 2, CPU)
    none, zero = np.zeros(0, np.int32), np.zeros(1, np.int32)
    arrays = StateArrays(_TOKENS, _TOKENS, CPU)
    arrays.fill(StateLayout(StepBatch(none, none, none, zero, none, none, zero, none), []), _TOKENS)
    scan = DeviceScan(states, arrays, Machine(2, capability))
    mixed = torch.zeros(1, _TOKENS, channels, dtype=dtype)
    hidden = scan.update_conv_state(mixed.transpose(1, 2), 0)
    scan.convolve(hidden, mixed[0, :_WIDTH].t(), mixed[0, 0], "silu")
    parts = mixed.split([_GROUPS * rows, _GROUPS * rows, _HEADS * columns], -1)
    query, keys, values = (
        part.unflatten(-1, (heads, -1)) for part, heads in zip(parts, (_GROUPS, _GROUPS, _HEADS), strict=True)
    )
    of_heads = torch.zeros(1, _TOKENS, _HEADS)
    if kind == "delta_rule":
        scan.delta_rule(query, keys, values, g=of_heads, beta=of_heads.to(dtype), use_qk_l2norm_in_kernel=True)
    else:
        scan.state_space(values, of_heads.to(dtype), of_heads[0, 0], keys, query, 16, D=of_heads[0, 0])
