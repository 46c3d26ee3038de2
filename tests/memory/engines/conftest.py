"""What tests of engines with memories share."""

from __future__ import annotations

import pytest

from tests.memory.engines.toy_engine import let_drafting_pay


@pytest.fixture(autouse=True)
def _drafting_pays(monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    let_drafting_pay(monkeypatch)


@pytest.fixture
def store_is_down(monkeypatch: pytest.MonkeyPatch, _drafting_pays: None) -> str:
    """The address of a store that nobody waits for."""
    monkeypatch.setattr("draftwood_memory.memory._FIRST_WAIT", 0.05)
    monkeypatch.setattr("draftwood_memory.memory_thread._LAST_ROUND_SECONDS", 0.1)
    return "redis://127.0.0.1:9"
