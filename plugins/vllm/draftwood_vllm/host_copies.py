"""Copies of small tensors from the device to the host, beside the steps: looked for later, never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

AboutT = TypeVar("AboutT")


class _Item(NamedTuple, Generic[AboutT]):
    about: AboutT
    copied: torch.Tensor | None
    landed: Any
    """A CUDA event; None if there is nothing to be looked for."""


class HostCopies(Generic[AboutT]):
    """Copies on their way, and marks between them, in the order in which they were sent.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._items: deque[_Item[AboutT]] = deque()

    def send(self, tensor: torch.Tensor, about: AboutT) -> None:
        """Copies a tensor as it is after what the current stream has been given so far."""
        if self._stream is None:
            self._items.append(_Item(about, tensor.clone(), None))
            return
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copied.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
            landed = torch.cuda.Event()
            landed.record(self._stream)
        self._items.append(_Item(about, copied, landed))

    def mark(self, about: AboutT) -> None:
        """Comes out of `arrived` when all that was sent before has."""
        self._items.append(_Item(about, None, None))

    def arrived(self) -> Iterator[tuple[AboutT, np.ndarray[Any, Any] | None]]:
        """What has arrived, in order, each once; None for a mark. Never waits."""
        while self._items and (self._items[0].landed is None or self._items[0].landed.query()):
            about, copied, _ = self._items.popleft()
            yield about, None if copied is None else copied.numpy()
