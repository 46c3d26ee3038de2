"""Triton's own interpreter leaves the same bits as kernels run by NumPy."""

from __future__ import annotations

import torch

from draftwood_model_runner.runners.model_calls import setting
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.launching import LAUNCHER, Launch
from tests.strategies.device.arenas import PlainArena
from tests.strategies.device.test_appending import random_steps


def written_arena() -> torch.Tensor:
    """Of texts and memories that have wrapped around, and recorded sequences."""
    arena = PlainArena(DeviceSizes(4, 64, 2, 256), regions=(0, 1, 0, 0))
    for runs in random_steps(0, rows=4, steps=8, longest=20):
        arena.write([0, 1, 2, 3], runs)
    arena.record(1, [1, 2, 3], [[1, 2, 3] * 10, [1, 2], [5] * 20])
    return arena.numbers


def test_numpy_and_triton_append_the_same() -> None:
    with setting(LAUNCHER, Launch.run_by_triton):
        interpreted = written_arena()
    assert torch.equal(interpreted, written_arena())
