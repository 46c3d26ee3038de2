"""What all tests of the model runner share."""

from __future__ import annotations

import math

import pytest
import torch

from draftwood_model_runner.sampling import grammar
from draftwood_strategies.draft_engine import controller as draft_account


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small models are faster on one thread, whatever the test before has set."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _drafting_may_take_its_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no reason to suspend drafting, except in the tests of just that."""
    if ".drafting." not in request.module.__name__:
        monkeypatch.setattr(draft_account, "MAX_CALL_SECONDS", math.inf)
        monkeypatch.setattr(draft_account, "MIN_CREDIT_SECONDS", math.inf)
        monkeypatch.setattr(draft_account, "MAX_PAUSES", (0, 0))
        monkeypatch.setattr(draft_account, "TRIED_SHARE", math.inf)


@pytest.fixture(autouse=True)
def _masks_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor to draft nothing behind a mask, except where a test makes masks slow."""
    monkeypatch.setattr(grammar, "_SLOW_SECONDS", math.inf)
