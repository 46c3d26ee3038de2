"""The models that draft beside the target, and which sequences each of them reads.

A model can draft for a sequence only if it reads what the sequence writes, which takes a share of each step. So it
reads where its drafts pay, by what strategies have learned of them, and elsewhere one sequence in many.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import Any

from draftwood_model_runner.errors import DeviceLostError
from draftwood_model_runner.model_drafts import Computed, ModelDrafts
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.base import AsksModels

_log = logging.getLogger(__name__)

_CHOSEN_STEPS = 16
"""For so many steps models read the same sequences, if none joins or leaves: a choice takes the host 0.25 ms."""
_READ_ANYWAY, _READ_ALONE = 256, 16
"""One in so many sequences is read by models that do not pay, to see when they pay again: the first number is of
sequences that share their steps, the second of those that have them alone, which costs less. Not tuned."""


class ModelsBeside:
    """The models of an engine that draft beside its target. One thread calls all methods."""

    def __init__(self, models: SequenceOf[ModelDrafts]) -> None:
        self._models = models
        self._started, self._numbers = 0, dict[Sequence, int]()
        self._chosen_for, self._chosen_steps = set[Sequence](), 0

    def start(self, sequence: Sequence) -> None:
        """A sequence that may ask models, until `close`."""
        self._started += 1
        self._numbers[sequence] = self._started

    def close(self, sequence: Sequence) -> None:
        """Forgets a sequence that needs no drafts any more."""
        self._numbers.pop(sequence, None)
        self._chosen_for.discard(sequence)
        for model in self._models:
            model.close(sequence)

    def check(self, live: SequenceOf[Sequence]) -> None:
        """Asserts that nothing is held of other sequences than these."""
        assert self._numbers.keys() | self._chosen_for <= {*live}
        for model in self._models:
            model.check(live)

    def choose(self, sequences: Collection[Sequence]) -> None:
        """Lets models read what those of a step's sequences write that may ask them in steps of as many, and not what
        those write that would not in steps of half as many: so it does not change from step to step. What was read of a
        sequence that is alone is kept, as a model that begins in the middle knows less."""
        if not self._models:
            return
        rows, present, chosen = len(sequences), {*sequences}, dict[int, tuple[SequenceOf[Any], SequenceOf[Any]]]()
        for model in self._models:
            model.shares.rows = rows
        self._chosen_steps += 1
        if self._chosen_for == present and self._chosen_steps < _CHOSEN_STEPS:
            return
        self._chosen_for, self._chosen_steps = present, 0
        for sequence in sequences:
            strategy: Any = sequence.strategy
            # A check of the protocol `AsksModels` would take 0.3 ms for the strategies of 32 tenants.
            asks = sequence.request.drafting.max_nodes and hasattr(strategy, "models_for")
            if not asks or not _drafts(sequence):
                continue
            if id(strategy) not in chosen:
                opened = _models_for(strategy, rows)
                chosen[id(strategy)] = opened, strategy.models if rows == 1 else _models_for(strategy, -(-rows // 2))
            opened, kept = chosen[id(strategy)]
            if self._numbers[sequence] % (_READ_ALONE if rows == 1 else _READ_ANYWAY) == 0:
                opened = strategy.models
            for model in self._models:
                if model in opened:
                    model.open(sequence)
                elif model not in kept:
                    model.pause(sequence)

    def observe_step(self, rows: int, seconds: float) -> None:
        """The target took so many seconds for a step without prompts."""
        for model in self._models:
            model.shares.observe_step(rows, seconds)

    def reads_features(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether a model reads features of a step of these."""
        return any(model.reads_features(sequences) for model in self._models)

    def observe(self, computed: SequenceOf[Computed], features: Any) -> None:
        """Tells the models what the target computed in a step, see `ModelDrafts.observe`. One that fails drafts no more
        for these sequences. Those whose drafting ended are read no further."""
        ended = [of.sequence for of in computed if not _drafts(of.sequence)]
        for model in self._models:
            for sequence in ended:
                model.close(sequence)
            try:
                model.observe(computed, features)
            except DeviceLostError:
                raise
            except Exception:
                _log.exception("a draft model failed in a step of %d sequences", len(computed))
                model.forget([of.sequence for of in computed])


def _drafts(sequence: Sequence) -> bool:
    """Whether a sequence that was started still drafts."""
    session = sequence.drafting
    return session is not None and session.drafter is not None and session.drafter.active


def _models_for(strategy: AsksModels, rows: int) -> SequenceOf[Any]:
    """What reads for a strategy in steps of so many rows; all that it has if it fails."""
    try:
        return strategy.models_for(rows)
    except Exception:
        _log.exception("%r failed to choose models", strategy)
        return strategy.models
