"""Tells errors of a GPU apart: those after which a smaller step may succeed, and those after which nothing will."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model_runner.errors import DeviceLostError, DeviceMemoryError

_CUDA_ERROR = "CUDA error"


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
    except torch.OutOfMemoryError as error:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise DeviceMemoryError(f"the device has no memory for {what}: {_first_line(error)}") from error
    except RuntimeError as error:
        if _CUDA_ERROR not in str(error):
            raise
        raise DeviceLostError(f"the device failed in {what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
