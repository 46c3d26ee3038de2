"""Where kernels run: on a GPU, or on a CPU where Triton interprets them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from draftwood_model_runner.errors import UnsupportedRunnerError

_INTERPRET = "TRITON_INTERPRET"


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


PROGRAMS = 2
"""Programs of attention for each multiprocessor: what shared memory allows for heads of 128 numbers."""


def machine(device: torch.device, head_size: int = 128) -> Machine:
    """Of a GPU: `PROGRAMS` for each multiprocessor, and more for smaller heads."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        processors = found.multi_processor_count
        each = PROGRAMS * max(1, 128 // head_size)
        return Machine(each * processors, 10 * found.major + found.minor, processors)
    return Machine(PROGRAMS)
