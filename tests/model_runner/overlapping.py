"""A runner on a CPU that chooses tokens and overlaps, as the one for GPUs does: for tests of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftwood_model_runner.runners.base import DraftLimits, KVCompaction, Predictions, Runner, StepBatch
from draftwood_model_runner.runners.choices import MOST_PROBABLE, NOT_CHOSEN, Choices
from draftwood_model_runner.sampling.verify import walk_predicted


@dataclass(eq=False)
class Step:
    """Implements `StepInFlight`; the logits are gone when another step has begun."""

    predictions: Predictions
    error: Exception | None = None
    waited: bool = False

    def wait(self) -> tuple[Predictions, float]:
        assert not self.waited
        self.waited = True
        if self.error is not None:
            raise self.error
        return self.predictions, 0.001


@dataclass(eq=False)
class OverlappingRunner:
    """Chooses the most probable tokens; all else is left to the host.

    Attributes:
        begun: all steps so far.
        begin_errors: raised by the next calls of `begin`, None for none; wait_errors: likewise by `wait`.
    """

    runner: Runner
    begun: list[Step] = field(default_factory=list)
    begin_errors: list[Exception | None] = field(default_factory=list)
    wait_errors: list[Exception | None] = field(default_factory=list)
    chooses: bool = True
    mixed_batches: bool = True

    @property
    def pages(self) -> int:
        return self.runner.pages

    @property
    def page_size(self) -> int:
        return self.runner.page_size

    def draft_limits(self, position: int) -> DraftLimits:
        return self.runner.draft_limits(position)

    def compact_kv(self, moves: KVCompaction) -> None:
        self.runner.compact_kv(moves)

    def step(self, batch: StepBatch, top_k: int, choices: Choices | None = None) -> Predictions:
        return self.begin(batch, top_k, choices).wait()[0]

    def begin(self, batch: StepBatch, top_k: int, choices: Choices | None = None) -> Step:
        if self.begin_errors and (error := self.begin_errors.pop(0)) is not None:
            raise error
        if self.begun:
            self.begun[-1].predictions.logits.fill_(math.nan)
        assert sum(not step.waited for step in self.begun[-2:]) <= 1
        found = self.runner.step(batch, top_k)
        chosen = None if choices is None else self._chosen(batch, found, choices)
        predictions = Predictions(found.logits.clone(), found.tokens, found.top_tokens, chosen)
        self.begun.append(Step(predictions, self.wait_errors.pop(0) if self.wait_errors else None))
        return self.begun[-1]

    def _chosen(self, batch: StepBatch, found: Predictions, choices: Choices) -> Any:
        """int32[R]; moves keys and values of what is accepted."""
        chosen = np.full(found.tokens.size, NOT_CHOSEN, np.int32)
        slots, moves = batch.slot_mapping(self.page_size), []
        logit_begins = np.searchsorted(batch.logit_rows, batch.cu_seqlens)
        for row in (choices.kinds == MOST_PROBABLE).nonzero()[0]:
            rows = slice(logit_begins[row], logit_begins[row + 1])
            root, begin, end = (
                int(batch.logit_rows[rows.start]),
                int(batch.cu_seqlens[row]),
                int(batch.cu_seqlens[row + 1]),
            )
            chosen[rows] = found.tokens[rows]
            path = walk_predicted(batch.tokens[root:end], batch.parents[root:end] - (root - begin), chosen[rows])
            nodes = [node for _, node in path][:-1]
            kept = [(slots[root + node], slots[root + depth]) for depth, node in enumerate(nodes, 1) if node != depth]
            moves.append(np.array(kept, np.int32).reshape(-1, 2))
        if any(one.size for one in moves):
            begins = np.cumsum([0, *(len(one) for one in moves)]).astype(np.int32)
            sources, targets = np.concatenate(moves).T.copy()
            self.runner.compact_kv(KVCompaction(sources, targets, begins))
        return chosen
