"""A foreign engine with the drafts that vLLM's plug-in opens, by variables of its environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from draftwood_strategies.budgeting import draft_account
from draftwood_tenants.engines.opening import ServedModel
from draftwood_vllm.opening import open_drafts
from tests.memory.engines.toy_engine import Model, ToyEngine, recitation

TEXT = np.random.default_rng(3).integers(0, 900, 60).tolist()
OTHER = np.random.default_rng(4).integers(0, 900, 60).tolist()
MODEL: Model = recitation(TEXT, OTHER)


def let_drafting_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of these engines takes microseconds, so that drafts would not pay."""
    monkeypatch.setattr(draft_account, "LEAST_CREDIT", 1e9)
    monkeypatch.setattr(draft_account, "LONGEST_PAUSES", (0, 0))
    monkeypatch.setattr(draft_account, "TRIED_SHARE", 1e9)


@contextmanager
def plugged(**variables: str) -> Iterator[ToyEngine]:
    """An engine whose process has variables `DRAFTWOOD_...`, here without that beginning."""
    made = ToyEngine(MODEL)
    environ = {f"DRAFTWOOD_{name.upper()}": value for name, value in variables.items()}
    model = ServedModel(None, "m", {}, 1000)
    opened = open_drafts({**environ, "XDG_CACHE_HOME": "/nonexistent"}, model, 8, lambda one: one in made.requests)
    made.drafts = opened.drafts
    times: Any = made.drafts.times
    # Wide steps cost little, as on a GPU; the rule's own times say nothing.
    for rows in (1, 2, 4):
        times.observe(rows, rows, 1.0)
    times.observe = lambda rows, tokens, seconds: None
    times.probes = lambda rows: False
    try:
        yield made
    finally:
        opened.close()


def ask(made: ToyEngine, request_id: str, prompt: list[int] = TEXT[:4], **options: Any) -> int:
    """Runs a request alone; the number of tokens that were drafted for it. Options without "draftwood_"."""
    made.add(request_id, prompt, 24, **{f"draftwood_{name}": value for name, value in options.items()})
    made.run()
    return made.finished[request_id].drafted
