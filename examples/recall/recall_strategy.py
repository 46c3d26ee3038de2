"""A drafting strategy: what followed the latest tokens when they occurred before, in this text or in earlier answers.

Nothing of Draftwood is imported: methods and attributes are found by name.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

MATCHES = (8, 4, 2)
"""How many of the latest tokens are looked up: the most first."""
END = -1
"""Between two sequences in a memory."""


class Memory:
    """Sequences of tokens, and what followed when the same tokens occurred last."""

    def __init__(self) -> None:
        self.log: list[int] = []
        self.next_of: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            for n in MATCHES:
                if len(self.log) >= n:
                    self.next_of[tuple(self.log[-n:])] = len(self.log)
            self.log.append(token)

    def continuation(self, text: list[int], length: int) -> tuple[int, list[int]]:
        """How many tokens matched, and at most `length` tokens that followed; (0, []) where none did."""
        for n in MATCHES:
            at = self.next_of.get(tuple(text[-n:]))
            if at is not None and self.log[at] != END:
                rest = self.log[at : at + length]
                return n, rest[: rest.index(END)] if END in rest else rest
        return 0, []


class RecallStrategy:
    """What the sequences of a tenant share: its earlier answers, and how often a match was right.

    Args:
        length: how many tokens of a continuation are drafted at most, 1 to 256.
        capacity_tokens: the older half is forgotten when there are more, at least 1,000.

    Raises:
        ValueError: an option's value is not allowed.
    """

    top_k = 0

    def __init__(self, *, length: int = 16, capacity_tokens: int = 200_000) -> None:
        if not 1 <= length <= 256:
            raise ValueError(f"length: {length} is not allowed; it must lie in [1, 256]")
        if capacity_tokens < 1000:
            raise ValueError(f"capacity_tokens: {capacity_tokens} is not allowed; it must be at least 1000")
        self.length = length
        self.capacity = capacity_tokens
        self.answers = Memory()
        self.rates = dict.fromkeys(MATCHES, 0.7)

    @property
    def tokens(self) -> int:
        """In memory."""
        return len(self.answers.log)

    def learn(self, tokens: npt.NDArray[np.int32]) -> None:
        """A whole sequence, int32[n]: an answer of another replica, a warmed text, a stored one after a restart."""
        self.answers.extend([*tokens.tolist(), END])
        if self.tokens > self.capacity:
            kept = self.answers.log[-self.capacity // 2 :]
            self.answers = Memory()
            self.answers.extend(kept)

    def start(self, prompt: npt.NDArray[np.int32]) -> RecallDrafter:
        return RecallDrafter(self, prompt.tolist(), learns=True)

    def start_read_only(self, prompt: npt.NDArray[np.int32]) -> RecallDrafter:
        return RecallDrafter(self, prompt.tolist(), learns=False)


class RecallDrafter:
    """Drafts for one sequence."""

    def __init__(self, strategy: RecallStrategy, prompt: list[int], learns: bool) -> None:
        self.strategy = strategy
        self.text = Memory()
        self.text.extend(prompt)
        self.answer: list[int] = []
        self.learns = learns
        self.guesses: list[tuple[int, int]] = []

    def propose(self, budget: int) -> SimpleNamespace:
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        nodes: dict[tuple[int, int], int] = {}
        self.guesses = []
        for memory in (self.text, self.strategy.answers):
            match, rest = memory.continuation(self.text.log, self.strategy.length)
            node, score = -1, 1.0
            for token in rest:
                score *= self.strategy.rates[match]
                if (node, token) not in nodes:
                    if len(tokens) == budget:
                        break
                    nodes[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    scores.append(score if node < 0 else min(score, scores[node]))
                node = nodes[node, token]
            if rest:
                self.guesses.append((match, rest[0]))
        return SimpleNamespace(
            tokens=np.array(tokens, np.int32), parents=np.array(parents, np.int32), scores=np.array(scores, np.float32)
        )

    def observe(self, accepted: npt.NDArray[np.int32], feedback: Any) -> None:
        written = accepted.tolist()
        if self.learns:
            for match, guess in self.guesses:
                self.strategy.rates[match] += 0.02 * ((guess == written[0]) - self.strategy.rates[match])
        self.guesses = []
        self.text.extend(written)
        self.answer += written

    def close(self) -> None:
        if self.learns:
            self.strategy.learn(np.array(self.answer, np.int32))
