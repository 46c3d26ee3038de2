"""Arrays that go to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNED = 16
"""Bytes: for pointers that are not, Triton compiles other code."""
_KINDS = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32, np.float64: torch.float64}


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
