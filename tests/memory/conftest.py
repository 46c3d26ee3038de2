"""What tests of memories share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_memory_goes_on() -> Iterator[None]:
    """One that was not stopped would log into the tests that follow."""
    before = {*threading.enumerate()}
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "memory" and thread not in before]
    assert not left, "a test has to stop each memory that it starts"


@pytest.fixture(autouse=True)
def frequent_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory looks once a second for what has become too old or too much."""
    monkeypatch.setattr("draftwood_memory.memory_thread._ROUND_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def slow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a round with a store that answers may take longer than a third of a second."""
    monkeypatch.setattr("draftwood_memory.memory_thread._SLOW_SECONDS", 5.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's first request waits for its memory, if the store answers, however long a busy machine takes for it."""
    monkeypatch.setattr("draftwood_memory.memory._FIRST_WAIT", 20.0)


@pytest.fixture
def evicts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories that are too many or too large are evicted in the next round, whoever waits for them."""
    monkeypatch.setattr("draftwood_memory.memory_thread._EVICT_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_memory.residents._WAITED_SECONDS", 0.0)


@pytest.fixture
def checks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories in use are compared with the store's in each round."""
    monkeypatch.setattr("draftwood_memory.memory_thread._CHECK_SECONDS", 0.0)
