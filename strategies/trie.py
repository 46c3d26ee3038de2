"""The trie strategy: drafts what the tenant wrote before in the same context. First working version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numba
import numpy as np

from strategies.base import Feedback
from strategies.draft import EMPTY_TREE, DraftTree, Int32Array
from strategies.registry import register

_ORDERS = 4


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _retrieve(log: Int32Array, size: int, context: Int32Array, found: Int32Array, lengths: Int32Array) -> int:
    n = 0
    for p in range(size - 1, 0, -1):
        length = 0
        while length < 16 and length < context.size and p > length and log[p - 1 - length] == context[-1 - length]:
            length += 1
        if length > 0 and log[p] >= 0:
            found[n] = p
            lengths[n] = length
            n += 1
            if n == found.size:
                break
    return n


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _grow(
    log: Int32Array, found: Int32Array, lengths: Int32Array, budget: int, depth: int
) -> tuple[Int32Array, Int32Array, np.ndarray]:
    tokens = np.empty(budget, np.int32)
    parents = np.empty(budget, np.int32)
    scores = np.empty(budget, np.float32)
    n = 0
    order = np.argsort(-lengths)
    for rank in range(order.size):
        p = found[order[rank]]
        score = np.float32(0.5 if lengths[order[rank]] > 2 else 0.2)
        node = -1
        for d in range(depth):
            if p + d >= log.size or log[p + d] < 0:
                break
            score *= np.float32(0.9)
            child = -1
            for i in range(n):
                if parents[i] == node and tokens[i] == log[p + d]:
                    child = i
                    break
            if child < 0:
                if n == budget:
                    break
                child = n
                tokens[n] = log[p + d]
                parents[n] = node
                scores[n] = score if node < 0 else min(score, scores[node])
                n += 1
            node = child
    return tokens[:n], parents[:n], scores[:n]


@register("trie")
class TrieStrategy:
    """One tenant's memory."""

    top_k = 0

    def __init__(
        self,
        *,
        branch_length: int = 24,
        learn: Literal["outputs", "prompts", "both"] = "outputs",
        prompt_weight: float = 1.0,
        capacity_tokens: int = 1_000_000,
    ) -> None:
        self.branch_length = branch_length
        self.learns = learn
        self.capacity_tokens = capacity_tokens
        self._sequences: list[Int32Array] = []
        self._log = np.full(1, -1, np.int32)

    @property
    def tokens(self) -> int:
        return sum(s.size for s in self._sequences)

    @property
    def nbytes(self) -> int:
        return self._log.nbytes

    def sequences(self) -> Iterator[Int32Array]:
        yield from self._sequences

    def learn(self, tokens: Int32Array) -> None:
        self._sequences.append(np.array(tokens, np.int32))
        self._log = np.concatenate([self._log, self._sequences[-1], np.full(1, -1, np.int32)]).astype(np.int32)

    def start(self, prompt: Int32Array) -> TrieDrafter:
        return TrieDrafter(self, prompt)


class TrieDrafter:
    """One live sequence."""

    def __init__(self, strategy: TrieStrategy, prompt: Int32Array) -> None:
        self._strategy = strategy
        self._prompt = prompt.size
        self._log = np.array(prompt, np.int32)
        self._closed = False

    def propose(self, budget: int) -> DraftTree:
        memory = np.concatenate([self._strategy._log, self._log, np.full(1, -1, np.int32)]).astype(np.int32)
        found = np.empty(64, np.int32)
        lengths = np.empty(64, np.int32)
        n = _retrieve(memory, memory.size - 1, self._log[-32:], found, lengths)
        if n == 0:
            return EMPTY_TREE
        return DraftTree(*_grow(memory, found[:n], lengths[:n], budget, self._strategy.branch_length))

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self._log = np.concatenate([self._log, accepted]).astype(np.int32)

    def close(self) -> None:
        if not self._closed and self._log.size > self._prompt:
            self._strategy.learn(self._log[self._prompt :])
        self._closed = True
