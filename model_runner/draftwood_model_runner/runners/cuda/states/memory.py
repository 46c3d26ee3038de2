"""The states of recurrent layers on the device: rows of a memory at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.runners.cuda.states.shapes import STATE_NODES, MixerShape


class ConvolutionStates(NamedTuple):
    """Of one convolution.

    Attributes:
        states: [rows, width - 1, channels], the last inputs, oldest first.
        nodes: [rows of live sequences, STATE_NODES, channels], inputs of nodes.
    """

    states: torch.Tensor
    nodes: torch.Tensor


class RecurrenceStates(NamedTuple):
    """Of one recurrence.

    Attributes:
        states: float32[rows, heads, rows, columns].
        nodes: for each of its inputs [rows of live sequences, STATE_NODES, ...].
    """

    states: torch.Tensor
    nodes: tuple[torch.Tensor, ...]


class MixerStates(NamedTuple):
    """Of one mixer."""

    convolutions: tuple[ConvolutionStates, ...]
    recurrence: RecurrenceStates | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        convolved = [tensor for one in self.convolutions for tensor in one]
        return convolved if self.recurrence is None else [*convolved, self.recurrence.states, *self.recurrence.nodes]


def allocated(shapes: Sequence[MixerShape], live: int, rows: int, device: torch.device) -> tuple[MixerStates, ...]:
    """The memory of each mixer.

    Args:
        live: rows, the first ones, that can hold what a live sequence keeps: inputs of nodes as well.
        rows: all.

    Raises:
        InvalidValueError: the device has no memory for them.
    """
    try:
        return tuple(_of(shape, live, rows, device) for shape in shapes)
    except RuntimeError as error:
        gigabytes = sum(rows * shape.state_bytes + live * shape.node_bytes for shape in shapes) / 1e9
        raise InvalidValueError(
            "max_running", live // 2, f"the device has no memory for {gigabytes:.1f} GB of recurrent layers' states"
        ) from error


def _of(shape: MixerShape, live: int, rows: int, device: torch.device) -> MixerStates:
    def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    convolutions = tuple(
        ConvolutionStates(
            zeros(rows, one.width - 1, one.channels, dtype=one.dtype),
            zeros(live, STATE_NODES, one.channels, dtype=one.dtype),
        )
        for one in shape.convolutions
    )
    recurrence = shape.recurrence
    if recurrence is None:
        return MixerStates(convolutions, None)
    nodes = tuple(zeros(live, STATE_NODES, *one.shape, dtype=one.dtype) for one in recurrence.inputs)
    states = zeros(rows, recurrence.heads, recurrence.rows, recurrence.columns)
    return MixerStates(convolutions, RecurrenceStates(states, nodes))
