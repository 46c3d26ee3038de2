"""What the machine of this process offers: threads, instructions, its heap. No torch before threads are asked for."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from draftwood_strategies.threads.cpus import usable_cpus

_CPUINFO = Path("/proc/cpuinfo")
_GAINS = (
    ({"avx512_bf16", "amx_bf16"}, "--dtype bfloat16", 1.8),
    ({"avx512_vnni", "avx_vnni", "amx_int8"}, "--weights int4", 2.9),
)
"""By instructions of which one is enough: an option, and how many times as many tokens a second a stream without drafts
gets as in float32. SmolLM2 135M, two cores of an AMD EPYC: 26, 48 and (in bfloat16 as well) 75 tokens a second."""


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
