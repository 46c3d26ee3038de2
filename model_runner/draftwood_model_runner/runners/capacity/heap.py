"""The heap of the process. No torch."""

from __future__ import annotations

import ctypes
import gc


def trim_heap() -> None:
    """Gives memory that was freed back to the system, if the C library is one that keeps it, as glibc does."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
