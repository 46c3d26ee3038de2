"""Which kernels are launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from draftwood_model_runner.runners.attention_hook import setting
from draftwood_model_runner.runners.cuda.device.launching import LAUNCHER, Launch


@contextmanager
def launched() -> Iterator[list[Launch]]:
    """What is launched within it."""
    found: list[Launch] = []

    def noted(one: Launch) -> None:
        found.append(one)
        one.run()

    with setting(LAUNCHER, noted):
        yield found
