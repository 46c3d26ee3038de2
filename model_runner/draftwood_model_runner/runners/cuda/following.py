"""Steps that follow one in flight: the device drafts from what that one writes, and fills in what the host did not
know.

vLLM (asynchronous scheduling) and SGLang (overlap scheduler) begin the next step beforehand as well; the host's part of
a step is hidden behind the device's. Here the drafts are trees, so the host lays a step out behind the longest context
that each row may have, and the device moves what it lays out to where the context ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftwood_model_runner.runners.base import Following, StepBatch
from draftwood_model_runner.runners.cuda.device import WORD, launch, power_of_2, to_device
from draftwood_model_runner.runners.cuda.kernels.following import continue_rows
from draftwood_model_runner.runners.cuda.memory import PAGE_SIZE, StepArrays
from draftwood_model_runner.runners.cuda.sampling import LaidOut, Written
from draftwood_strategies.arrays import segment_sizes
from draftwood_strategies.base import DeviceTrees


@dataclass(frozen=True, eq=False, slots=True)
class Followed:
    """What a step goes on with.

    Attributes:
        written: by the step in flight.
        following: of the step that follows it.
    """

    written: Written
    following: Following

    def trees(self) -> DeviceTrees | None:
        """Drafts behind what is written; None if there are none to make."""
        draft = self.following.draft
        return None if draft is None else draft(self.written)

    def fill(self, arrays: StepArrays, batch: StepBatch, trees: DeviceTrees | None) -> LaidOut:
        """Fills in a step that was laid out; returns it on the host, where it is when the stream has come so far."""
        tokens = arrays.tokens
        # Without drafts none is read.
        drafts = (tokens,) * 3 if trees is None else (trees.tokens, trees.parents, trees.counts)
        given = {"sources": self.following.sources, "drafted": self.following.drafted, "contexts": batch.context_lens}
        on_device = to_device(given, tokens.device)
        nodes = max(16, power_of_2(int(segment_sizes(batch.cu_seqlens).max())))
        launch(
            continue_rows,
            (batch.rows,),
            *(tokens, arrays.positions, arrays.prefixes, arrays.parents, arrays.slots, arrays.ancestor_bitmask),
            *(arrays.token_parts, arrays.parts, arrays.pages, arrays.logit_offsets),
            *(self.written.tokens, self.written.counts, self.written.ends),
            *(on_device[name] for name in given),
            *(*drafts, drafts[0].stride(0)),
            WRITTEN=self.written.tokens.shape[1],
            NODES=nodes,
            USED_WORDS=min(-(-nodes // WORD), arrays.word_capacity),
            WORDS=arrays.word_capacity,
            PAGE_SIZE=PAGE_SIZE,
        )
        scores = tokens.new_empty((0, 0), dtype=torch.float32) if trees is None else trees.scores
        laid_out = tokens[: batch.size], arrays.parents[: batch.size], scores
        of_tokens, of_parents, of_scores = (_on_host(part) for part in laid_out)
        return LaidOut(of_tokens, of_parents, of_scores, self.following.drafted >= 0)


def _on_host(array: torch.Tensor) -> torch.Tensor:
    """A copy that is there when the stream has come so far."""
    pinned = array.device.type == "cuda"
    return torch.empty(array.shape, dtype=array.dtype, pin_memory=pinned).copy_(array, non_blocking=True)
