"""The recycling strategy: drafts the tokens that the model held most probable after the same context before.

Token Recycling (arXiv 2408.08696) with contexts of up to four tokens instead of one, and with learned weights for ranks
and contexts instead of a fixed template: the tree takes the shape that the budget and the recent hits of each rank
give it. It can draft text that was never written, for it also learns at rejected nodes.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Annotated

from draftwood_strategies.base import StepFeedback
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.mixing.mixer import Mixer, SequenceMixer
from draftwood_strategies.native import Int32Array
from draftwood_strategies.options import Range, check, read_options
from draftwood_strategies.registry import register
from draftwood_strategies.successors import WIDTH, SuccessorTable


@register("recycling")
class RecyclingStrategy:
    """One tenant's successor table; a `SuccessorSource`.

    Args:
        capacity_contexts: how many contexts the table holds at most, 44 bytes each; those written longest ago leave
            first. At least 1024; rounded down to a power of two.

    Raises:
        ValueError: the option's value is not allowed.
    """

    top_k = WIDTH

    def __init__(self, *, capacity_contexts: Annotated[int, Range(minimum=SuccessorTable.LEAST)] = 1 << 17) -> None:
        check(read_options(RecyclingStrategy), {"capacity_contexts": capacity_contexts})
        self.successors = SuccessorTable(capacity_contexts)
        self._mixer = Mixer(self.successors)

    @property
    def nbytes(self) -> int:
        """Bytes of table and weights."""
        return self._mixer.nbytes

    def set_model_table(self, rows: Int32Array) -> None:
        self._mixer.model_table = rows

    def keep_learned(self, earlier: RecyclingStrategy) -> None:
        self.successors, self._mixer = earlier.successors, earlier._mixer

    def start(self, prompt: Int32Array) -> SequenceMixer:
        return SequenceMixer(self._mixer, prompt)

    def start_read_only(self, prompt: Int32Array) -> SequenceMixer:
        return SequenceMixer(self._mixer, prompt, learns=False)

    def propose_all(self, drafters: SequenceOf[SequenceMixer], budgets: Int32Array) -> DraftTrees:
        return self._mixer.draft_all(drafters, (), budgets)

    def observe_all(
        self,
        drafters: SequenceOf[SequenceMixer],
        accepted: Int32Array,
        offsets: Int32Array,
        feedback: StepFeedback | None,
    ) -> None:
        self._mixer.observe_all(drafters, accepted, offsets, feedback)
