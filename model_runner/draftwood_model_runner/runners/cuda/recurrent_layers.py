"""Recurrent layers on the device: what each keeps, its memory, and its kernels over the draft trees of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.runners.cuda.device import CONVOLUTION_BLOCK, STATE_BLOCK, Machine, launch, power_of_2
from draftwood_model_runner.runners.cuda.kernels.states import convolve, recurrence
from draftwood_model_runner.runners.cuda.state_rows import StateArrays
from draftwood_model_runner.runners.model_calls import setting
from draftwood_model_runner.runners.recurrent_layers import STEP, LayerCall, RecurrentLayer
from draftwood_model_runner.runners.scanning import Convolution, Scan, StateSpace, time_steps

STATE_NODES = 32
"""Nodes of a draft tree whose inputs are kept for the next step: the largest tree of a sequence."""
_TOKENS = 5
_SILU = ("silu", "swish")

_PROGRAMS = 2
"""Programs of a recurrence for each one of attention that runs side by side."""


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


class LayerShape(NamedTuple):
    """What a recurrent layer keeps of a sequence.

    Attributes:
        convolutions: by number.
    """

    convolutions: tuple[ConvolutionShape, ...]
    recurrence: RecurrenceShape | None

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a sequence after a token."""
        convolved = sum(shape.channels * (shape.width - 1) * shape.dtype.itemsize for shape in self.convolutions)
        recurrence = self.recurrence
        return convolved + (4 * recurrence.heads * recurrence.rows * recurrence.columns if recurrence else 0)

    @property
    def node_bytes(self) -> int:
        """Bytes of the inputs of a draft tree's nodes."""
        convolved = sum(shape.channels * shape.dtype.itemsize for shape in self.convolutions)
        inputs = self.recurrence.inputs if self.recurrence else ()
        return STATE_NODES * (convolved + sum(part.nbytes for part in inputs))


class _Noting(Scan):
    """Notes what functions are called with; returns zeros in place of outputs.

    All raise ValueError for what the kernels do not compute.
    """

    def __init__(self) -> None:
        super().__init__()
        self._convolutions: dict[int, ConvolutionShape] = {}
        self._recurrence: RecurrenceShape | None = None

    @property
    def shape(self) -> LayerShape:
        convolutions = tuple(self._convolutions[number] for number in range(len(self._convolutions)))
        return LayerShape(convolutions, self._recurrence)

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
    """Implements `recurrent_layers.RecurrentStep`."""

    width = _TOKENS

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def run(self, layer: RecurrentLayer, call: LayerCall) -> Any:
        if layer.index in self.shapes:
            raise ValueError("a recurrent layer is computed twice")
        scan = _Noting()
        output = layer.scan(call, scan)
        self.shapes[layer.index] = scan.shape
        return output


def shapes_of(module: Any, recurrent_layers: Sequence[RecurrentLayer]) -> tuple[LayerShape, ...]:
    """What each recurrent layer of a model keeps.

    Raises:
        ValueError: the kernels do not compute a recurrent layer.
    """
    for layer in recurrent_layers:
        if not layer.can_scan:
            raise ValueError(f"{type(layer.part).__name__} is not computed by functions that kernels can replace")
    step = _NotingStep()
    with setting(STEP, step):
        module(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long, device=module.device), use_cache=False)
    return tuple(step.shapes[index] for index in range(len(recurrent_layers)))


class ConvolutionStates(NamedTuple):
    """The memory of one convolution.

    Attributes:
        states: [rows, width - 1, channels], the last inputs, oldest first.
        nodes: [rows of live sequences, STATE_NODES, channels], inputs of nodes.
    """

    states: torch.Tensor
    nodes: torch.Tensor


class RecurrenceStates(NamedTuple):
    """The memory of one recurrence.

    Attributes:
        states: float32[rows, heads, rows, columns].
        nodes: for each of its inputs [rows of live sequences, STATE_NODES, ...].
    """

    states: torch.Tensor
    nodes: tuple[torch.Tensor, ...]


class LayerStates(NamedTuple):
    """The memory of one recurrent layer."""

    convolutions: tuple[ConvolutionStates, ...]
    recurrence: RecurrenceStates | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        convolved = [tensor for states in self.convolutions for tensor in states]
        return convolved if self.recurrence is None else [*convolved, self.recurrence.states, *self.recurrence.nodes]


def allocated(shapes: Sequence[LayerShape], live: int, rows: int, device: torch.device) -> tuple[LayerStates, ...]:
    """The memory of each recurrent layer.

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


def _of(shape: LayerShape, live: int, rows: int, device: torch.device) -> LayerStates:
    def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    convolutions = tuple(
        ConvolutionStates(
            zeros(rows, part.width - 1, part.channels, dtype=part.dtype),
            zeros(live, STATE_NODES, part.channels, dtype=part.dtype),
        )
        for part in shape.convolutions
    )
    recurrence = shape.recurrence
    if recurrence is None:
        return LayerStates(convolutions, None)
    nodes = tuple(zeros(live, STATE_NODES, *part.shape, dtype=part.dtype) for part in recurrence.inputs)
    states = zeros(rows, recurrence.heads, recurrence.rows, recurrence.columns)
    return LayerStates(convolutions, RecurrenceStates(states, nodes))


class DeviceScan(Scan):
    """One call of a recurrent layer. `shapes_of` has checked what it is called with.

    Args:
        states: its memory.
        arrays: the step.
    """

    def __init__(self, states: LayerStates, arrays: StateArrays, machine: Machine) -> None:
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
    """Implements `recurrent_layers.RecurrentStep`.

    Attributes:
        width: tokens of the step with padding.
    """

    def __init__(self, states: Sequence[LayerStates], arrays: StateArrays, width: int, machine: Machine) -> None:
        self._states, self._arrays, self._machine = states, arrays, machine
        self.width = width

    def run(self, layer: RecurrentLayer, call: LayerCall) -> Any:
        return layer.scan(call, DeviceScan(self._states[layer.index], self._arrays, self._machine))


def _with_heads(tensor: torch.Tensor) -> torch.Tensor:
    """[T, head, size] with the numbers of all heads of a token side by side."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()
