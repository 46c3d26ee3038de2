"""The window of Lookahead Decoding: a Jacobi iteration ahead of the text that makes n-grams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf


class Window:
    """The Jacobi iteration ahead of one sequence.

    Args:
        columns: W, at least 1.
        n: the length of the n-grams that it makes, at least 3.
        tokens: the first level's tokens and those of columns that were not verified, without end.

    Attributes:
        levels: level 0 holds W - 1 tokens, levels 1 to N - 2 hold W each, the newest last. While the window fills
            there are fewer levels, and they are longer.
    """

    def __init__(self, columns: int, n: int, tokens: Iterator[int]) -> None:
        self.columns = columns
        self._n = n
        self._tokens = tokens
        self.levels = [[*itertools.islice(tokens, columns + n - 3)]]

    def paths(self) -> list[list[int]]:
        """The tokens from the last committed one to each node of the newest level, column by column."""
        chain, *others = self.levels
        if not others:
            return [chain[: w + 1] for w in range(len(chain))]
        return [chain[:w] + [level[w] for level in others] for w in range(len(others[-1]))]

    def advance(self, last: int, predictions: SequenceOf[int | None]) -> list[list[int]]:
        """Moves on by one iteration.

        Args:
            last: the token under which the window was drafted.
            predictions: the model's token after each of `paths`; None where the path was not verified.

        Returns:
            The n-grams that are complete now, one a column.
        """
        new = [next(self._tokens) if token is None else token for token in predictions]
        chain, *others = self.levels
        if len(self.levels) < self._n - 1:
            self.levels = [level[1:] for level in self.levels] + [new[1:] if others else new]
            return []
        keys = [last, *chain]
        ngrams = [[keys[w], *(level[w] for level in others), new[w]] for w in range(len(new))]
        self.levels = [others[0][1:], *others[1:], new]
        return [ngram for ngram, token in zip(ngrams, predictions, strict=True) if token is not None]
