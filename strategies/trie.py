"""The trie strategy: drafts what was written before in the same context, by the sequence itself or by its tenant.

Each live sequence has a small phrase index of its prompt and output; the tenant's memory is one phrase index of what
its sequences wrote, learned as they write. Both vote on every node of a draft. In the manner of Lookahead (Alipay,
arXiv 2312.12728), but with all context lengths mixed instead of two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from strategies.base import Feedback
from strategies.draft import EMPTY_TREE, DraftTree, Int32Array
from strategies.phrase_draft import draft
from strategies.phrase_index import START, PhraseIndex
from strategies.phrase_mixing import Scratch, Weights, learn, learn_calibration
from strategies.phrase_prior import prior_weights
from strategies.phrase_retrieval import COLUMNS
from strategies.registry import register

_LEARNABLE = ("outputs", "prompts", "both")
_OWN_CAPACITY = 1 << 20
_EVERYTHING = 1 << 40
_START = np.array([START], np.int32)
_room = threading.local()


def _scratch(budget: int) -> Scratch:
    """This thread's room for drafts of up to `budget` nodes."""
    if getattr(_room, "budget", 0) < budget:
        _room.budget = max(budget, 64)
        _room.scratch = Scratch.of(_room.budget)
    scratch: Scratch = _room.scratch
    return scratch


@register("trie")
class TrieStrategy:
    """One tenant's memory of phrases.

    Args:
        branch_length: the deepest draft, in tokens, 1 to 256.
        learn: what the memory learns of each sequence, "outputs", "prompts" or "both".
        prompt_weight: how much a phrase of the own prompt counts at first, against what is usual; online learning
            goes on from there. Above 0.
        capacity_tokens: how many tokens the memory holds; the oldest leave first. At least 64.

    Raises:
        ValueError: an option's value is not allowed.
    """

    top_k = 0

    def __init__(
        self,
        *,
        branch_length: int = 32,
        learn: str = "outputs",
        prompt_weight: float = 1.0,
        capacity_tokens: int = 1_000_000,
    ) -> None:
        if not 1 <= branch_length <= 256:
            raise ValueError(f"branch_length: {branch_length} is not allowed; it must lie in [1, 256]")
        if learn not in _LEARNABLE:
            raise ValueError(f"learn: {learn!r} is not allowed; it must be one of {', '.join(_LEARNABLE)}")
        if not 0.0 < prompt_weight < 1000.0:
            raise ValueError(f"prompt_weight: {prompt_weight} is not allowed; it must lie in (0, 1000)")
        self.branch_length = branch_length
        self.learns = learn
        self.memory = PhraseIndex(capacity_tokens)
        self.weights: Weights = prior_weights(prompt_weight)

    @property
    def tokens(self) -> int:
        """How many tokens the memory holds."""
        return self.memory.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, the weights included, live sequences' own indexes not."""
        return self.memory.nbytes + self.weights.nbytes

    def sequences(self) -> Iterator[Int32Array]:
        """What the memory holds, sequence by sequence, int32[n], the oldest first; `learn` takes them again."""
        return self.memory.sequences()

    def learn(self, tokens: Int32Array) -> None:
        """Adds a whole recorded sequence, int32[n], to the memory."""
        writer = self.memory.writer()
        self.memory.append(writer, _START)
        self.memory.append(writer, tokens)

    def start(self, prompt: Int32Array) -> TrieDrafter:
        return TrieDrafter(self, prompt)


class TrieDrafter:
    """Drafts for one sequence, and writes it into the tenant's memory as it grows."""

    def __init__(self, strategy: TrieStrategy, prompt: Int32Array) -> None:
        self._strategy = strategy
        self._own = PhraseIndex(_OWN_CAPACITY, prompt.shape[0] + 256)
        self._own_writer = self._own.writer()
        self._own.append(self._own_writer, prompt)
        self._writer = strategy.memory.writer()
        learned = prompt.shape[0] if strategy.learns == "both" else 0
        strategy.memory.append(self._writer, _START)
        if strategy.learns != "outputs":
            strategy.memory.append(self._writer, prompt)
        if strategy.learns == "prompts":
            learned = _EVERYTHING
        self._place = np.array([self._own_writer[0], self._writer[1], self._own_writer[0] + 1, learned], np.int64)
        self._followed = np.array([-1, -1, 0, 0], np.int64)
        self._tree = EMPTY_TREE
        self._roots = np.empty((0, COLUMNS), np.int32)
        self._shares = EMPTY_TREE.scores
        self._longest = EMPTY_TREE.tokens

    def propose(self, budget: int) -> DraftTree:
        scratch = _scratch(budget)
        own, memory, weights = self._own, self._strategy.memory, self._strategy.weights
        tokens, parents, longest = np.empty((3, budget), np.int32)
        scores, shares = np.empty((2, budget), np.float32)
        n, found = draft(
            own.log, own.links, own.heads, own.blocks, memory.log, memory.links, memory.heads, memory.blocks,
            self._place, self._followed, weights.features, weights.escapes, weights.calibration,
            scratch.candidates, scratch.trust, scratch.chain, scratch.nodes, scratch.scores, scratch.heap, scratch.table, scratch.seen, scratch.path, scratch.marked, scratch.roots,
            self._strategy.branch_length, tokens, parents, scores, shares, longest,
        )  # fmt: skip
        self._tree = DraftTree(tokens[:n], parents[:n], scores[:n])
        self._shares, self._longest = shares[:n], longest[:n]
        self._roots = scratch.roots[:found].copy()
        return self._tree

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        strategy, own, memory, weights = self._strategy, self._own, self._strategy.memory, self._strategy.weights
        scratch = _scratch(1)
        learn(
            own.log, own.blocks, memory.log, memory.blocks, weights.features, weights.escapes,
            self._roots, accepted, strategy.branch_length, self._followed, scratch.trust, scratch.chain,
        )  # fmt: skip
        learn_calibration(
            weights.calibration, self._tree.tokens, self._tree.parents, self._shares, self._longest, accepted
        )
        self._tree = EMPTY_TREE
        self._roots = self._roots[:0]
        self._shares, self._longest = self._shares[:0], self._longest[:0]
        own.append(self._own_writer, accepted)
        self._place[0] = self._own_writer[0]
        self._place[3] += accepted.shape[0]
        if strategy.learns != "prompts":
            memory.append(self._writer, accepted)

    def close(self) -> None:
        """What was learned stays in the memory."""
