"""What tests of engines with memories share."""

from __future__ import annotations

import pytest

from tests.memory.engines.toy_engine import let_drafting_pay


@pytest.fixture(autouse=True)
def _drafting_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafting_pay(monkeypatch)
