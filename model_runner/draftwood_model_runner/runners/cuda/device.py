"""The device: sizes of kernels' blocks, how kernels are launched, and how arrays are sent.

The sizes of attention were tried on an H200. The others were chosen by reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from draftwood_model_runner.errors import UnsupportedRunnerError

WORD = 64
"""Nodes of an ancestor word, and entries of a KV cache that a program of attention reads at a time."""
LEAST_RUN, LEAST_RUN_OF_MANY = 2 * WORD, 4 * WORD
"""Entries that a part of attention with few rows reads at least, and one with many, whose sums take as much memory
traffic as 256 entries: fewer are not worth a part of their own."""
MERGED_PARTS = 16
"""Parts that a merge reads at a time. One after the other, each took 0.7 us on an H200."""
LINEAR_BLOCK = (64, 64, 64)
"""Block of an exact linear layer: rows and columns of a program, and numbers that it multiplies at a time."""
SILU_BLOCK = 1024
"""Columns of a program that multiplies gate and up of an MLP."""
SAMPLING_BLOCK, SAMPLING_ENTRIES = 1024, 128
"""Scores that a program reads at a time when it chooses a token, and tokens with rules of their own."""
TOP_BLOCK = 4096
"""Logits among which a program finds the most probable ones."""
CONVOLUTION_BLOCK = 512
"""Channels of a program of a short convolution."""
STATE_BLOCK = 4096
"""Numbers of a recurrent layer's state that a program keeps in registers."""


_INTERPRET = "TRITON_INTERPRET"

PROGRAMS = 2
"""Programs of attention for each multiprocessor: what shared memory allows for heads of 128 numbers."""
_ALIGNED = 16
"""Bytes: for pointers that are not, Triton compiles other code."""
_KINDS = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32, np.float64: torch.float64}


def require_triton(device: torch.device) -> None:
    """Checks that Triton compiles kernels for a GPU, or interprets those for a CPU.

    Raises:
        UnsupportedRunnerError: Triton is missing, or was imported for the other kind of device.
    """
    interpreted = device.type == "cpu"
    try:
        from triton.language import standard
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise UnsupportedRunnerError("CUDA: the package triton is not installed; torch for CUDA brings it") from error
    if isinstance(standard.max, JITFunction) == interpreted:
        advice = "interprets kernels only with" if interpreted else "compiles kernels only without"
        raise UnsupportedRunnerError(f"CUDA: on {device} this process {advice} {_INTERPRET}=1 in its environment")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Runs a kernel on the current stream, or does what `LAUNCHER` says."""
    LAUNCHER.get()(Launch(kernel, grid, arguments, constants))


class Launch(NamedTuple):
    """A kernel and what it is called with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants)


LAUNCHER: ContextVar[Callable[[Launch], None]] = ContextVar("draftwood_launcher", default=Launch.run)
"""Called for each kernel."""


class Machine(NamedTuple):
    """What launches depend on.

    Attributes:
        programs: programs of attention with few rows that run side by side.
        capability: compute capability, 90 for 9.0.
        processors: streaming multiprocessors.
    """

    programs: int
    capability: int = 90
    processors: int = 1


def machine(device: torch.device, head_size: int = 128) -> Machine:
    """The machine of a device. A GPU has `PROGRAMS` for each multiprocessor, and more for smaller heads."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        processors = properties.multi_processor_count
        each = PROGRAMS * max(1, 128 // head_size)
        return Machine(each * processors, 10 * properties.major + properties.minor, processors)
    return Machine(PROGRAMS)


def power_of_2(size: int) -> int:
    """The least that is not below `size`."""
    return 1 << (size - 1).bit_length()


class DeviceBuffer:
    """Named arrays, one after the other in one piece of pinned memory and in one of the device.

    Attributes:
        host: the arrays on the host, to be filled. What was sent before from the same piece must have arrived, as it
            has when the results of its step are known.
        memory: uint8[...], all arrays on the device.

    Args:
        fields: dtype and shape of each array.
        pieces: of pinned memory; with several, `swap` goes on to the next, while the last one is still being sent.
    """

    def __init__(
        self, fields: Mapping[str, tuple[type[Any], tuple[int, ...]]], device: torch.device, pieces: int = 1
    ) -> None:
        self._offsets: dict[str, int] = {}
        size = 0
        for name, (kind, shape) in fields.items():
            self._offsets[name] = size
            size += -(-int(np.prod(shape)) * np.dtype(kind).itemsize // _ALIGNED) * _ALIGNED
        pinned = device.type == "cuda"
        self._pieces = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(pieces)]
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._hosts: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(pieces)]
        self._device: dict[str, torch.Tensor] = {}
        for name, (kind, shape) in fields.items():
            part = slice(self._offsets[name], self._offsets[name] + int(np.prod(shape)) * np.dtype(kind).itemsize)
            for piece, host in zip(self._pieces, self._hosts, strict=True):
                host[name] = piece.numpy()[part].view(kind).reshape(shape)
            self._device[name] = self.memory[part].view(_KINDS[kind]).view(shape)
        self.host = self._hosts[0]

    def __getitem__(self, name: str) -> torch.Tensor:
        """An array on the device."""
        return self._device[name]

    def swap(self) -> None:
        """Goes on to the next piece of pinned memory, which `host` is from now on."""
        self._pieces.append(self._pieces.pop(0))
        self._hosts.append(self._hosts.pop(0))
        self.host = self._hosts[0]

    def send(self, until: str, size: int) -> None:
        """Copies the arrays up to the one named, of which only the first `size` numbers, on the current stream."""
        end = self._offsets[until] + size * self.host[until].itemsize
        self.memory[:end].copy_(self._pieces[0][:end], non_blocking=True)


def to_device(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> DeviceBuffer:
    """Arrays of this step alone, by one copy on the current stream."""
    buffer = DeviceBuffer({name: (array.dtype.type, array.shape) for name, array in arrays.items()}, device)
    for name, array in arrays.items():
        buffer.host[name][...] = array
    last = [*arrays][-1]
    buffer.send(until=last, size=arrays[last].size)
    return buffer
