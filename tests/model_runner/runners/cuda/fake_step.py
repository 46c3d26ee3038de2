"""Within it, modules of a model behave as in a step of the runner, but for attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from draftwood_model_runner.runners.cuda.device.launching import LAUNCHER, Launch
from draftwood_model_runner.runners.cuda.steps.attention import STEP
from draftwood_model_runner.runners.cuda.steps.pending import Pending


@contextmanager
def fake_step() -> Iterator[Pending]:
    pending = Pending()
    token = STEP.set(cast(Any, SimpleNamespace(pending=pending)))
    try:
        yield pending
    finally:
        STEP.reset(token)


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
