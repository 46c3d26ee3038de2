"""A step from its layout to the end of its forward pass. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from draftwood_model_runner.drafting.draft_policy import Drafts
from draftwood_model_runner.runners.base import StepBatch, StepInFlight
from draftwood_model_runner.runners.batch import Chains, lay_out_trees
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence
from draftwood_model_runner.sequence import Sequence, SequenceState


class BegunStep(NamedTuple):
    """What the device computes, and for whom.

    Attributes:
        scheduled: what its sequences compute.
        slot_generations: of each sequence, see `Sequence.slot_generation`.
        started: on the clock of `time.perf_counter`.
        host_seconds: that it took to schedule, to draft and to begin.
    """

    batch: StepBatch
    scheduled: list[ScheduledSequence]
    slot_generations: list[int]
    on_device: StepInFlight
    started: float
    host_seconds: float

    @property
    def sequences(self) -> Collection[Sequence]:
        return {one.sequence for one in self.scheduled}

    @property
    def only_decodes(self) -> bool:
        """No sequence reads more than its latest token, beside its draft."""
        return all(one.tokens == 1 for one in self.scheduled)

    @property
    def valid_rows(self) -> list[int]:
        """The batch rows whose sequences still have the slots that they had when the step began."""
        rows = zip(self.scheduled, self.slot_generations, strict=True)
        return [row for row, (one, generation) in enumerate(rows) if _has_slot(one.sequence, generation)]


def _has_slot(sequence: Sequence, generation: int) -> bool:
    return sequence.state is SequenceState.RUNNING and sequence.slot_generation == generation


def lay_out_step(drafts: Drafts, pool: KVPool, min_score: float) -> StepBatch:
    """The flat batch of a step: of each draft, the nodes with at least this score."""
    sizes = [one.tokens for one in drafts.scheduled]
    sequences = [one.sequence for one in drafts.scheduled]
    chains = Chains(
        block_tables=[pool.pages(one) for one in sequences],
        context_lens=np.array([one.committed for one in sequences], np.int32),
        tokens=_next_tokens(drafts.scheduled),
        cu_seqlens=np.cumsum([0, *sizes], dtype=np.int32),
        logits_from=np.array(sizes, np.int32) - np.int32(1),
        prompt_lens=np.array([one.request.prompt.size for one in sequences], np.int32),
    )
    return lay_out_trees(chains, drafts.trees, drafts.max_depths, min_score)


def _next_tokens(scheduled: Iterable[ScheduledSequence]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """int32[c]: the tokens that sequences compute, one sequence after the other."""
    if all(one.sequence.committed + 1 == one.sequence.length for one in scheduled):  # all decode
        return np.array([one.sequence.last_token for one in scheduled], np.int32)
    return np.concatenate([one.sequence.tokens(one.sequence.committed, one.tokens) for one in scheduled])
