"""A foreign engine with the drafts that a plug-in opens, by variables of its environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from draftwood_memory.engines.forms.chains import ChainForm
from draftwood_tenants.engines.opening import OpenedDrafts, ServedModel
from tests.memory.engines.toy_engine import CheapTokens, Model, ToyEngine, recitation

TEXT = np.random.default_rng(3).integers(0, 900, 60).tolist()
OTHER = np.random.default_rng(4).integers(0, 900, 60).tolist()
MODEL: Model = recitation(TEXT, OTHER)


@contextmanager
def plugged(**variables: str) -> Iterator[ToyEngine]:
    """An engine whose process has variables `DRAFTWOOD_...`, here without that beginning."""
    made = ToyEngine(MODEL)
    environ = {f"DRAFTWOOD_{name.upper()}": value for name, value in variables.items()}
    model = ServedModel(None, "m", {}, 1000)
    environ["XDG_CACHE_HOME"] = "/nonexistent"
    form = ChainForm(8, CheapTokens())
    opened = OpenedDrafts("vLLM", environ, model, form, lambda one: one in made.requests)
    made.drafts = opened.drafts
    try:
        yield made
    finally:
        opened.close()


def ask(made: ToyEngine, request_id: str, prompt: list[int] = TEXT[:4], **options: Any) -> int:
    """Runs a request alone; the number of tokens that were drafted for it. Options without "draftwood_"."""
    made.add(request_id, prompt, 24, **{f"draftwood_{name}": value for name, value in options.items()})
    made.run()
    return made.finished[request_id].drafted
