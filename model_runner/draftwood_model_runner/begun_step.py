"""A step that has begun and not ended. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood_model_runner.runners.base import Predictions, StepBatch, StepInFlight
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence
from draftwood_model_runner.sequence import Sequence, SequenceState


class BegunStep(NamedTuple):
    """What the device computes, and for whom.

    Attributes:
        scheduled: what its sequences compute.
        slot_generations: of each sequence, see `Sequence.slot_generation`.
        kept: bool[S], the batch rows whose accepted keys and values the runner moves; None for no row.
        started: on the clock of `time.perf_counter`.
        host_seconds: that it took to schedule, to draft and to begin.
    """

    batch: StepBatch
    scheduled: SequenceOf[ScheduledSequence]
    slot_generations: SequenceOf[int]
    kept: npt.NDArray[np.bool_] | None
    on_device: StepInFlight
    started: float
    host_seconds: float

    @property
    def sequences(self) -> set[Sequence]:
        return {work.sequence for work in self.scheduled}

    @property
    def can_overlap(self) -> bool:
        """Whether another step may begin before this one ends: nothing that is left to the host needs its logits."""
        if self.kept is None:
            return False
        writes = np.array([work.reaches_end for work in self.scheduled])
        masked = any(work.sequence.grammar is not None for work in self.scheduled)
        return not masked and bool(self.kept[writes].all())

    @property
    def only_decodes(self) -> bool:
        """No sequence reads more than its latest token, beside its draft."""
        return all(work.tokens == 1 for work in self.scheduled)

    def is_valid(self, row: int) -> bool:
        """Whether the sequence of a batch row still has the slot that it had when the step began."""
        sequence = self.scheduled[row].sequence
        return sequence.state is SequenceState.RUNNING and sequence.slot_generation == self.slot_generations[row]


class Computed(NamedTuple):
    """Implements `StepInFlight` for a runner that has computed the step when it returns."""

    predictions: Predictions
    seconds: float

    def wait(self) -> tuple[Predictions, float]:
        return self
