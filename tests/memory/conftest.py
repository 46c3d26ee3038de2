"""What tests of memories share."""

from __future__ import annotations

import pytest


@pytest.fixture
def evicts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories that are too many or too large are evicted in the next round, whoever waits for them."""
    monkeypatch.setattr("draftwood_memory.replication.upkeep._EVICT_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_memory.local.residents._WAITED_SECONDS", 0.0)
