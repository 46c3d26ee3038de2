"""What the machine, or its container, has for a runner: threads, instructions, memory; and what its errors mean.

It imports torch only where a runner asks, as processes without one read it too.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from draftwood_model_runner.errors import DeviceLostError, DeviceMemoryError, InvalidValueError
from draftwood_strategies.threads import usable_cpus

if TYPE_CHECKING:
    import torch

    from draftwood_model_runner.runners.base import KVShape

_CPUINFO = Path("/proc/cpuinfo")
_GAINS = (
    ({"avx512_bf16", "amx_bf16"}, "--dtype bfloat16", 1.8),
    ({"avx512_vnni", "avx_vnni", "amx_int8"}, "--weights int4", 2.9),
)
"""Instructions of which one is enough, an option, and how many times as many tokens a second than in float32 it gives a
stream without drafts. SmolLM2 135M, two cores of an AMD EPYC: 26, 48 and (in bfloat16 as well) 75 tokens a second."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_KEPT_STATES = 1 << 28
"""Bytes of states that are kept for sequences with the same prefix, beside an eighth of the KV memory."""
Arrays = TypeVar("Arrays")
_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
"""How errors begin of the runtime and the libraries that torch calls, of the driver, and of Triton's launches."""
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")


def default_threads() -> int:
    """Threads of a step that names no number: those of torch (its own choice, or OMP_NUM_THREADS), and no more than
    `usable_cpus`. Threads beyond the quota spin while the kernel holds the process back."""
    import torch

    return min(torch.get_num_threads(), usable_cpus())


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The name of the CPU; "" if the system does not tell it."""
    return next(iter(_values(cpuinfo, "model name")), "")


def gains_over_float32(cpuinfo: Path = _CPUINFO) -> dict[str, float]:
    """Options that would make a model of 100 million parameters or more faster on this CPU, and about how many times as
    fast; empty if it has no such instructions, or does not say."""
    flags = {flag for value in _values(cpuinfo, "flags")[:1] for flag in value.split()}
    return {option: gain for instructions, option, gain in _GAINS if flags & instructions}


def _values(cpuinfo: Path, name: str) -> list[str]:
    """The values of a field, one for each CPU thread; none if the file cannot be read."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name]


def trim_heap() -> None:
    """Gives memory that was freed back to the system, if the C library is one that keeps it, as glibc does."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def default_capacity(
    bytes_per_token: int, device: torch.device, context: int, sequences: int, bytes_per_sequence: int = 0
) -> int:
    """Tokens for `sequences` whole contexts, or for as many as fit a share of the device's free memory.

    Args:
        bytes_per_sequence: of the states of recurrent layers, which are in that share too; they get half of it at most.

    Raises:
        InvalidValueError: not even one fits.
    """
    share = 0.8 if device.type == "cuda" else 0.5
    memory = int(share * free_bytes(device))
    affordable = memory // bytes_per_token
    if bytes_per_sequence:
        of_states = min(sequences * bytes_per_sequence, memory // 2)
        affordable = max(0, memory - of_states - _least_kept(memory)) * 8 // (9 * bytes_per_token)
    if affordable < context:
        gigabytes = context * bytes_per_token / 1e9
        raise InvalidValueError(
            "max_context",
            context,
            f"keys and values of one context take {gigabytes:.1f} GB, for which memory does not suffice; at most"
            f" {affordable} tokens fit {share:.0%} of what is free, and kv_cache_tokens can set another limit",
        )
    return min(sequences * context, affordable)


class StateCapacity(NamedTuple):
    """How much of recurrent layers' states the memory of the device holds.

    Attributes:
        sequences: live ones; at least one.
        kept_bytes: of states that no live sequence needs.
    """

    sequences: int
    kept_bytes: int


def state_capacity(bytes_per_sequence: int, kv_bytes: int, device: torch.device) -> StateCapacity:
    """How many states fit beside keys and values of `kv_bytes`, which are not allocated yet."""
    memory = int(0.9 * free_bytes(device))
    kept = kv_bytes // 8 + _least_kept(memory)
    return StateCapacity(max(1, (memory - kv_bytes - kept) // bytes_per_sequence), kept)


def _least_kept(memory: int) -> int:
    return min(_KEPT_STATES, memory // 8)


def free_bytes(device: torch.device) -> int:
    """Unused memory of the device; on a CPU within the limit of the container."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min(_machine_bytes(_MEMINFO), _container_bytes(_CGROUP))


def _machine_bytes(meminfo: Path) -> int:
    """What Linux calls available; elsewhere half of the memory that there is."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_bytes(cgroup: Path) -> int:
    """What is left below the limit of a version 2 control group, where pages of files that can go count as free."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(stat.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return 2**63  # no limit: the file is absent, or reads "max"


def bytes_per_token(shapes: SequenceOf[KVShape], itemsize: int, more_values: int = 0) -> int:
    """Bytes of the keys and values of one token in all layers.

    Args:
        itemsize: bytes of a number.
        more_values: numbers that each head stores beside its value.
    """
    return itemsize * sum(heads * (key_dim + value_dim + more_values) for heads, key_dim, value_dim in shapes)


def allocated(
    shapes: SequenceOf[KVShape], tokens: int, token_bytes: int, empty: Callable[[KVShape, int], Arrays]
) -> dict[KVShape, Arrays]:
    """The arrays of each shape.

    Args:
        tokens, token_bytes: capacity, and the bytes of a token, for the text of the error.
        empty: makes the arrays of so many layers of a shape.

    Raises:
        InvalidValueError: the device has no memory for them.
    """
    try:
        return {shape: empty(shape, layers) for shape, layers in Counter(shapes).items()}
    except (MemoryError, OSError, RuntimeError) as error:  # RuntimeError: torch, on either device
        gigabytes = tokens * token_bytes / 1e9
        raise InvalidValueError(
            "kv_cache_tokens", tokens, f"the device has no memory for their {gigabytes:.1f} GB of keys and values"
        ) from error


def by_layer(shapes: SequenceOf[KVShape], arrays: Mapping[KVShape, Any]) -> list[Any]:
    """For each layer its part, without a copy, of arrays that each hold all layers of a shape, one after the other."""
    used: Counter[KVShape] = Counter()
    parts = []
    for shape in shapes:
        parts.append(arrays[shape][used[shape]])
        used[shape] += 1
    return parts


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Translates errors of torch.

    Args:
        what: was computed, for messages.

    Raises:
        DeviceMemoryError: memory did not suffice; what torch kept in reserve is given back.
        DeviceLostError: the device reports an error that stays until the process ends (illegal address, failed
            assertion, hardware).
    """
    import torch

    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        message = str(error)
        from_device = isinstance(error, torch.AcceleratorError) or any(kind in message for kind in _DEVICE_ERRORS)
        no_memory = from_device and any(kind in message for kind in _OUT_OF_MEMORY)
        if no_memory or isinstance(error, torch.OutOfMemoryError):
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            raise DeviceMemoryError(f"the device has no memory for {what}: {_first_line(error)}") from error
        if from_device:
            raise DeviceLostError(f"the device failed in {what}: {_first_line(error)}") from error
        raise


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
