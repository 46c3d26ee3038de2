"""Compiles kernels to machine code for GPUs that need not be there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from draftwood_model_runner.runners.cuda.device.launching import LAUNCHER, Launch

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_DIVISIBLE = 16


class Launching(Protocol):
    """Code of the runner for some models."""

    def run(self, capability: int) -> None:
        """Launches its kernels as on a GPU of this compute capability."""


def launches_of(code: Launching, capability: int) -> list[Launch]:
    """What it would launch: it runs on a CPU with a launcher that only notes that."""
    noted: list[Launch] = []
    token = LAUNCHER.set(noted.append)
    try:
        code.run(capability)
    finally:
        LAUNCHER.reset(token)
    return noted


class Compiled(NamedTuple):
    """What a kernel takes on a GPU.

    Attributes:
        cubin_bytes: size of its machine code.
        shared_bytes: shared memory of a program.
        registers: of a thread.
        spills: bytes of local memory of a thread: registers that did not suffice.
    """

    cubin_bytes: int
    shared_bytes: int
    registers: int
    spills: int


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[object]]]]:
    """Types of all arguments, values of constants, and which arguments are divisible by 16: what Triton's own
    specialisation of the call would be."""
    types: dict[str, str] = {}
    constants = {name: value for name, value in launch.constants.items() if name not in _OPTIONS}
    divisible: dict[tuple[int], list[list[object]]] = {}
    for place, name in enumerate(launch.kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
            continue
        value = launch.arguments[place]
        specialised = not launch.kernel.params[place].do_not_specialize
        if isinstance(value, torch.Tensor):
            types[name] = "*" + _TYPES[value.dtype]
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1 and specialised:
            types[name], constants[name] = "constexpr", 1
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if specialised and isinstance(number, int) and number % _DIVISIBLE == 0 and types[name] != "constexpr":
            divisible[(place,)] = [["tt.divisibility", _DIVISIBLE]]
    return types, constants, divisible


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Machine code for a compute capability, such as 90.

    Raises:
        Exception: whatever Triton raises for a kernel that it cannot compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, divisible = signature(launch)
    source = ASTSource(launch.kernel, types, constants, divisible)
    options = {name: launch.constants[name] for name in _OPTIONS if name in launch.constants}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = kernel.asm["cubin"]
    registers, spills = _resources(cubin)
    return Compiled(len(cubin), kernel.metadata.shared, registers, spills)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, as the tool of CUDA that Triton brings reads them."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = knobs.nvidia.cuobjdump.path
        usage = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2]) + int(found[3])
