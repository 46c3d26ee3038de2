"""What the mixers of a model keep, found out by computing them once with functions that only note their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from draftwood_model_runner.runners.attention_hook import setting
from draftwood_model_runner.runners.states.mixers import STEP, Mixer, MixerCall
from draftwood_model_runner.runners.states.scanning import Convolution, Scan, StateSpace

STATE_NODES = 32
"""Nodes of a draft tree whose inputs are kept for the next step: the largest tree of a sequence."""
_TOKENS = 5
_SILU = ("silu", "swish")


class ConvolutionShape(NamedTuple):
    """A causal convolution over `width` inputs of each channel."""

    channels: int
    width: int
    dtype: torch.dtype


class Input(NamedTuple):
    """What a recurrence takes of each token."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class RecurrenceShape(NamedTuple):
    """A recurrence over states float32[heads, rows, columns].

    Attributes:
        inputs: from which a token is replayed.
    """

    heads: int
    rows: int
    columns: int
    inputs: tuple[Input, ...]


class MixerShape(NamedTuple):
    """What a mixer keeps of a sequence.

    Attributes:
        convolutions: by number.
    """

    convolutions: tuple[ConvolutionShape, ...]
    recurrence: RecurrenceShape | None

    @property
    def state_bytes(self) -> int:
        """Of a sequence after a token."""
        convolved = sum(one.channels * (one.width - 1) * one.dtype.itemsize for one in self.convolutions)
        recurrence = self.recurrence
        return convolved + (4 * recurrence.heads * recurrence.rows * recurrence.columns if recurrence else 0)

    @property
    def node_bytes(self) -> int:
        """Of the inputs of a draft tree's nodes."""
        convolved = sum(one.channels * one.dtype.itemsize for one in self.convolutions)
        inputs = self.recurrence.inputs if self.recurrence else ()
        return STATE_NODES * (convolved + sum(one.nbytes for one in inputs))


class _Noting(Scan):
    """Notes what functions are called with; returns zeros in place of outputs.

    All raise ValueError for what the kernels do not compute.
    """

    def __init__(self) -> None:
        super().__init__()
        self._convolutions: dict[int, ConvolutionShape] = {}
        self._recurrence: RecurrenceShape | None = None

    @property
    def shape(self) -> MixerShape:
        convolutions = tuple(self._convolutions[number] for number in range(len(self._convolutions)))
        return MixerShape(convolutions, self._recurrence)

    def convolve_inputs(self, call: Convolution) -> torch.Tensor:
        number, inputs, weight, _, activation = call
        if number in self._convolutions or (activation is not None and activation not in _SILU):
            raise ValueError(f"its convolution {number} has activation {activation}, or is computed twice")
        if weight.shape[1] < 2:
            raise ValueError("it convolves single tokens")
        self._convolutions[number] = ConvolutionShape(weight.shape[0], weight.shape[1], inputs.dtype)
        return torch.zeros_like(inputs)

    def scan_deltas(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        if g.dim() != 3:
            raise ValueError("the delta rule is computed for one decay of a head only")
        inputs = tuple(Input(tuple(part.shape[2:]), part.dtype) for part in (key, value, g, beta))
        self._note(RecurrenceShape(value.shape[2], key.shape[3], value.shape[3], inputs))
        return torch.zeros_like(value)

    def scan_states(self, given: StateSpace) -> torch.Tensor:
        values, written = given.inputs, given.written
        key, value = (Input(tuple(part.shape[2:]), part.dtype) for part in (written, values))
        inputs = key, value, Input(tuple(given.dt.shape[2:]), torch.float32)
        self._note(RecurrenceShape(values.shape[2], written.shape[3], values.shape[3], inputs))
        return torch.zeros_like(values)

    def _note(self, shape: RecurrenceShape) -> None:
        if self._recurrence is not None:
            raise ValueError("it computes two recurrences")
        self._recurrence = shape


class _NotingStep:
    """Implements `mixers.StepOfMixers`."""

    width = _TOKENS

    def __init__(self) -> None:
        self.shapes: dict[int, MixerShape] = {}

    def run(self, mixer: Mixer, call: MixerCall) -> Any:
        if mixer.index in self.shapes:
            raise ValueError("a recurrent layer is computed twice")
        scan = _Noting()
        output = mixer.scan(call, scan)
        self.shapes[mixer.index] = scan.shape
        return output


def shapes_of(module: Any, mixers: Sequence[Mixer]) -> tuple[MixerShape, ...]:
    """What each mixer of a model keeps.

    Raises:
        ValueError: the kernels do not compute a mixer.
    """
    for mixer in mixers:
        if not mixer.can_scan:
            raise ValueError(f"{type(mixer.part).__name__} is not computed by functions that kernels can replace")
    step = _NotingStep()
    with setting(STEP, step):
        module(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long, device=module.device), use_cache=False)
    return tuple(step.shapes[index] for index in range(len(mixers)))
