"""Whether the machine can have the device that the model is to run on, asked before torch is imported."""

from __future__ import annotations

from contextlib import suppress
from ctypes import CDLL
from pathlib import Path

from draftwood_model_runner.errors import InvalidValueError

_DRIVER = "libcuda.so.1"
_ROCM = Path("/dev/kfd")
"""The driver of AMD's GPUs, which torch for ROCm calls CUDA devices too."""


def require_driver(device: str) -> None:
    """Raises InvalidValueError for a CUDA device on a machine without a driver for any; torch counts them later."""
    if not device.startswith("cuda") or _ROCM.exists():
        return
    with suppress(OSError):
        CDLL(_DRIVER)
        return
    raise InvalidValueError("device", device, "this machine has no GPU driver, so it must be auto or cpu")
