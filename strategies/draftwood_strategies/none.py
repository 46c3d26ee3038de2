"""The strategy that never drafts: plain decoding, one token a step."""

from __future__ import annotations

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import Feedback
from draftwood_strategies.draft import EMPTY_TREE, DraftTree


class NoDrafts:
    """Strategy and drafter in one, since there is no state."""

    top_k = 0

    def start(self, prompt: Int32Array) -> NoDrafts:
        return self

    def propose(self, budget: int) -> DraftTree:
        return EMPTY_TREE

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        pass

    def close(self) -> None:
        pass
