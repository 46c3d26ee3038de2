"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.stages import FAST, ONLY_FAST, is_never_fast, stage_of

if TYPE_CHECKING:
    from tests.memory.servers import Valkey

# A test fails for what the code does, never for how fast this machine is: pytest's timeout ends what hangs.
settings.register_profile(
    "untimed", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("nightly", settings.get_profile("untimed"), max_examples=500)
settings.load_profile("untimed")


# What an idle engine writes by itself would compete with other tests for the cores.
os.environ.setdefault("DRAFTWOOD_OWN_TEXT_TOKENS", "0")

# A shell that starts a job in the background lets it ignore Ctrl-C, which processes of tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast stage does not import files of other stages."""
    if config.option.markexpr != ONLY_FAST or not collection_path.is_relative_to(config.rootpath):
        return None
    return is_never_fast(collection_path.relative_to(config.rootpath).as_posix()) or None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its stage."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        called = getattr(item, "callspec", None)
        try:
            path = item.path.relative_to(config.rootpath).as_posix()
            stage = stage_of(path, marks, {} if called is None else called.params)
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from error
        if stage != FAST and stage not in marks:
            item.add_marker(stage)


def pytest_collection() -> None:
    """Test modules import millions of objects, all of which stay: no garbage collection looks at them, now or later."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # pytest collects garbage before
def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module")
def running() -> Iterator[Valkey]:
    """A store that the tests of a file share."""
    from tests.memory.servers import Valkey  # not in environments of other engines

    with Valkey() as server:
        yield server


@pytest.fixture
def server(running: Valkey) -> Valkey:
    """An empty store, shared over the tests of a file: none may stop it."""
    running.client.flushall()
    return running
