"""Which kernels are launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from draftwood_model_runner.runners.cuda.device.launching import LAUNCHER, Launch


@contextmanager
def launched() -> Iterator[list[str]]:
    """Names of the kernels that are launched within it."""
    names: list[str] = []

    def noted(one: Launch) -> None:
        names.append(one.kernel.__name__)
        one.run()

    token = LAUNCHER.set(noted)
    try:
        yield names
    finally:
        LAUNCHER.reset(token)
