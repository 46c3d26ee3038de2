"""Moves keys and values of accepted draft tokens on the device."""

from __future__ import annotations

import numpy as np
import torch

from model_runner.runners.base import KVMoves
from model_runner.runners.cuda.kernels.kv import move_kv
from model_runner.runners.cuda.kv_cache import PAGE_SIZE, KVPages
from model_runner.runners.cuda.launching import launch


class KVMover:
    """Implements `Runner.keep`. The host does not wait for the device."""

    def __init__(self, kv: KVPages, device: torch.device) -> None:
        self._kv = kv
        self._device = device

    def move(self, moves: KVMoves) -> None:
        slots = np.stack([moves.sources, moves.targets], 1).astype(np.int64)
        on_device = torch.from_numpy(slots).to(self._device, non_blocking=True)
        begins = torch.from_numpy(moves.begins).to(self._device, non_blocking=True)
        for shape, memory in self._kv.by_shape.items():
            width = shape.key_dim + shape.value_dim
            launch(
                move_kv,
                (memory.shape[0], shape.kv_heads, moves.begins.size - 1),
                *(memory, on_device, begins, memory.stride(0)),
                KV_HEADS=shape.kv_heads,
                WIDTH=width,
                BLOCK=1 << (width - 1).bit_length(),
                PAGE_SIZE=PAGE_SIZE,
            )
