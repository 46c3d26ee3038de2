"""The device of these tests, a CPU where kernels are interpreted or the one that `make test-gpu` names, and its
launches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftwood_model_runner.runners.cuda.device import LAUNCHER, Launch
from draftwood_model_runner.runners.model_calls import setting

DEVICE = torch.device(os.environ.get("GPU_TEST_DEVICE", "cpu"))


@contextmanager
def launched() -> Iterator[list[Launch]]:
    """What is launched within it."""
    launches: list[Launch] = []

    def noted(launch: Launch) -> None:
        launches.append(launch)
        launch.run()

    with setting(LAUNCHER, noted):
        yield launches
