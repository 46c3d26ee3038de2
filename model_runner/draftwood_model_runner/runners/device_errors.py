"""Tells errors of a GPU apart: those after which a smaller step may succeed, and those after which nothing will."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftwood_model_runner.errors import DeviceLostError, DeviceMemoryError

_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
"""Of the runtime and the libraries that torch calls, of the driver, and of Triton's launches."""
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")


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
