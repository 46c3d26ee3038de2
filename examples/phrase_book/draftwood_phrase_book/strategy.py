"""The strategy and its drafters. Nothing of Draftwood is imported: its methods are found by name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwood_phrase_book.book import PhraseBook, read_book

BOOK_VARIABLE = "PHRASE_BOOK"
"""The environment variable with the book's file, for a strategy without the option `book`."""

LONGEST_TEXT = 64
"""How many tokens of the sequence are kept to compare with the book."""
MOST_PHRASES = 8
"""How many phrases one draft may hold."""
RATE = 0.05
"""Weight of the latest draft in the running averages of `PhraseBookStrategy.rates`."""


@dataclass(frozen=True)
class Tree:
    """What `propose` returns; any class with these three attributes will do.

    Attributes:
        tokens: int32[n].
        parents: int32[n], each node's parent, which comes before it; -1 hangs from the last token of the sequence.
        scores: float32[n], the probability that the whole path down to the node comes true; it never grows along one.
    """

    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]


class PhraseBookStrategy:
    """One tenant's book and the acceptance rates of its phrases.

    Args:
        book: a file of phrases, see `read_book`; unset, the file in the variable PHRASE_BOOK; without either the book
            is empty.
        least_match: how many tokens of a phrase must be there before the rest is drafted, 1 to 16.
        longest_draft: how many tokens of a phrase are drafted at most, 1 to 256.

    Attributes:
        rates: by length of the match, up to 16, the acceptance rate of a phrase's next token.

    Raises:
        ValueError: an option's value is not allowed, or the book cannot be read.
    """

    top_k = 0
    """How many of the model's most probable tokens its drafters get at each node; 0 for none."""

    def __init__(self, *, book: str = "", least_match: int = 2, longest_draft: int = 32) -> None:
        for name, value, greatest in (("least_match", least_match, 16), ("longest_draft", longest_draft, 256)):
            if not 1 <= value <= greatest:
                raise ValueError(f"{name}: {value} is not allowed; it must lie in [1, {greatest}]")
        path = book or os.environ.get(BOOK_VARIABLE, "")
        self.book = PhraseBook(read_book(Path(path)) if path else [], least_match)
        self.longest_draft = longest_draft
        self.rates = [1.0 - 0.5**length for length in range(17)]

    def rate(self, match: int) -> float:
        """The probability that the next token of a phrase is right after so long a match."""
        return self.rates[min(match, 16)]

    def learn(self, match: int, right: bool) -> None:
        self.rates[min(match, 16)] += RATE * (right - self.rate(match))

    def start(self, prompt: npt.NDArray[np.int32]) -> PhraseBookDrafter:
        """A drafter for a sequence that begins with `prompt`, int32[p]."""
        return PhraseBookDrafter(self, prompt)


class PhraseBookDrafter:
    """Drafts for one sequence. Called from one thread only."""

    def __init__(self, strategy: PhraseBookStrategy, prompt: npt.NDArray[np.int32]) -> None:
        self._strategy = strategy
        self._text: list[int] = prompt[-LONGEST_TEXT:].tolist()
        self._guesses: dict[int, int] = {}

    def propose(self, budget: int) -> Tree:
        """A tree of at most `budget` nodes, budget >= 1; no nodes where no phrase of the book goes on."""
        nodes: dict[tuple[int, int], int] = {}
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        self._guesses = {}
        for match in self._strategy.book.matches(self._text, MOST_PHRASES):
            # The longest match comes first: a token that several phrases hold keeps the best score.
            self._guesses.setdefault(match.rest[0], match.length)
            node, score = -1, 1.0
            for depth, token in enumerate(match.rest[: self._strategy.longest_draft]):
                score = min(score, scores[node] if node >= 0 else 1.0) * self._strategy.rate(match.length + depth)
                if (node, token) not in nodes:
                    if len(tokens) == budget:
                        break
                    nodes[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    scores.append(score)
                node = nodes[node, token]
        return Tree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32))

    def observe(self, accepted: npt.NDArray[np.int32], feedback: Any) -> None:
        """The sequence grew by `accepted`, int32[a], a >= 1: right draft tokens, and the model's own last one.

        `feedback` has the model's predictions at each node of the verified tree; it may be None.
        """
        written = accepted.tolist()
        for token, match in self._guesses.items():
            self._strategy.learn(match, token == written[0])
        self._guesses = {}
        self._text = (self._text + written)[-LONGEST_TEXT:]

    def close(self) -> None:
        """The sequence ended, in whatever way. Called once."""
