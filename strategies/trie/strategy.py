"""The trie strategy: drafts what was written before in the same context, by the sequence itself or by its tenant.

Each live sequence has a small phrase index of its prompt and output; the tenant's memory is one phrase index of what
its sequences wrote, learned as they write. Both vote on every node of a draft. In the manner of Lookahead (Alipay,
arXiv 2312.12728), but with all context lengths mixed instead of two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from strategies.base import Feedback
from strategies.draft import EMPTY_TREE, DraftTree, Float32Array, Int32Array
from strategies.registry import register
from strategies.trie.expansion import AT_END, DEEPEST, WRITTEN, Room, draft, room_for
from strategies.trie.learning import learn
from strategies.trie.phrase_index import START, PhraseIndex
from strategies.trie.prior import prior_weights
from strategies.trie.retrieval import COLUMNS
from strategies.trie.weights import Weights

_LEARNABLE = ("outputs", "prompts", "both")
_OWN_CAPACITY = 1 << 20
_EVERYTHING = 1 << 40
_START = np.array([START], np.int32)
_NO_ROOTS = np.empty((0, COLUMNS), np.int32)
_NOTHING: tuple[Int32Array, Int32Array, Float32Array, Int32Array] = (
    EMPTY_TREE.tokens,
    EMPTY_TREE.parents,
    EMPTY_TREE.scores,
    EMPTY_TREE.tokens,
)
"""Tokens, parents, shares and longest matches of a draft of no nodes."""
_thread = threading.local()


def _room(budget: int) -> Room:
    """This thread's room for drafts of up to `budget` nodes."""
    if getattr(_thread, "budget", 0) < budget:
        _thread.budget = max(budget, 64)
        _thread.room = room_for(_thread.budget)
    room: Room = _thread.room
    return room


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
        if not 1 <= branch_length <= DEEPEST:
            raise ValueError(f"branch_length: {branch_length} is not allowed; it must lie in [1, {DEEPEST}]")
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
        return self.memory.nbytes + sum(table.nbytes for table in self.weights)

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
        learned = {"outputs": 0, "prompts": _EVERYTHING, "both": prompt.shape[0]}[strategy.learns]
        if strategy.learns != "outputs":
            strategy.memory.append(self._writer, _START)
            strategy.memory.append(self._writer, prompt)
        self._place = np.array([self._own_writer[0], self._writer[1], self._own_writer[0] + 1, learned], np.int64)
        self._followed = np.array([-1, -1, 0, 0], np.int64)
        self._roots, self._drafted = _NO_ROOTS, _NOTHING

    def propose(self, budget: int) -> DraftTree:
        strategy = self._strategy
        room: tuple[Any, ...] = _room(budget)
        tokens, parents, longest = np.empty((3, budget), np.int32)
        scores, shares = np.empty((2, budget), np.float32)
        arguments: tuple[Any, ...] = (
            *self._own.view, *strategy.memory.view, *strategy.weights, *room, self._place, self._followed,
            strategy.branch_length, tokens, parents, scores, shares, longest,
        )  # fmt: skip
        n, found = draft(*arguments)
        tree = DraftTree(tokens[:n], parents[:n], scores[:n])
        self._drafted = tree.tokens, tree.parents, shares[:n], longest[:n]
        self._roots = room[-1][:found].copy()
        return tree

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        strategy, room = self._strategy, _room(1)
        memory, own, written = strategy.memory, self._own, accepted.shape[0]
        remember = strategy.learns != "prompts"
        own.reserve(written)
        if remember:
            if self._writer[0] < 0:
                memory.append(self._writer, _START)
            memory.reserve(written)
        arguments: tuple[Any, ...] = (
            *own.view, own.ring, self._own_writer, *memory.view, memory.ring, self._writer, remember,
            *strategy.weights, self._followed, self._roots, *self._drafted, accepted, strategy.branch_length,
            room.trust, room.chain, room.heap,
        )  # fmt: skip
        learn(*arguments)
        self._roots, self._drafted = _NO_ROOTS, _NOTHING
        self._place[AT_END] = self._own_writer[0]
        self._place[WRITTEN] += written

    def close(self) -> None:
        """What was learned stays in the memory."""
