"""Targets with models beside them that draft, and strategies that ask these at any cost."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draftwood_model_runner.engine import Engine, model_strategies
from draftwood_model_runner.loading.loaded import DraftModel, LoadedModel
from draftwood_model_runner.loading.model import BUNDLED_MODEL, load_model
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy, create
from tests.draft_models import write_untrained_head
from tests.model_runner.families import served

NAMES = ("draft_model", "head", "hybrid")
"""Strategies that draft by what is beside the bundled model; `hybrid` by both."""


def drafting_for_itself(model: LoadedModel) -> LoadedModel:
    """All that it drafts first for greedy decoding is right."""
    itself = DraftModel("itself", model.factory, None, model.parameters)
    return replace(model, drafters={**model.drafters, "draft_model": itself})


@functools.cache
def served_beside(family: str, runner: str = "torch") -> LoadedModel:
    """As `families.served`, drafting for itself; the bundled model by OpenVINO with an untrained head as well."""
    if (family, runner) != ("bundled", "openvino"):
        return drafting_for_itself(served(family, runner))
    with TemporaryDirectory() as folder:
        head = write_untrained_head(Path(folder) / "head")
        model = load_model(BUNDLED_MODEL, dtype="float32", max_context=512, runner=runner, draft_head=head)
    return drafting_for_itself(model)


def assert_no_faults(sequences: Iterable[Sequence]) -> None:
    """Drafting went on for all, with all sources of a hybrid."""
    for sequence in sequences:
        assert sequence.stats.drafting_disabled_reason == ""
        assert not getattr(sequence.strategy, "failures", None)


def create_beside(engine: Engine, name: str, **options: Any) -> Strategy:
    """A strategy that may draft by the models of an engine, for which their levels cost nothing from now on."""
    for drafts in engine.model_drafts.values():
        drafts.level_share = lambda rows=None: 0.0  # type: ignore[method-assign]
    with model_strategies(engine):
        return create(name, **options)
