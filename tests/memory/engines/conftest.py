"""What all tests of drafts for other engines share."""

from __future__ import annotations

import math

import pytest

from draftwood_strategies.budgeting import draft_account


@pytest.fixture(autouse=True)
def _drafting_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the toy engine takes less time than a draft, so that drafting would be suspended."""
    monkeypatch.setattr(draft_account, "LEAST_CREDIT", math.inf)
    monkeypatch.setattr(draft_account, "LONGEST_PAUSES", (0, 0))
    monkeypatch.setattr(draft_account, "TRIED_SHARE", math.inf)
